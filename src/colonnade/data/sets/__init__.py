"""Known data sets, and streams made to order: one file each."""
