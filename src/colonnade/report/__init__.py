"""Results to look at: a run as a page, runs side by side."""
