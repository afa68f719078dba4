"""Ratios of a bench's figures, and printed tables."""
