"""Planning of a run: sample its data, measure the machine, place rows, and time candidate plans."""
