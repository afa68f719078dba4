"""Towers: partition of features by affinity, and predicted savings of tower exchanges and tower modules."""
