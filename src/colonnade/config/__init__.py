"""Sections of a run's configuration: typed and validated, with unit and default of every setting."""
