"""Sections of a run's configuration: typed, validated, every field documented with its unit."""
