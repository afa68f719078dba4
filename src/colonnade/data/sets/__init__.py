"""Readers of public data sets and generators of synthetic ones, one file each."""
