"""Interactions of users with items: columns from files, splits of them, and the samples made of a split."""
