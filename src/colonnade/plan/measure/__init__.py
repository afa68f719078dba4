"""Measurements for plans: this machine's memory, disks and links; popularity of rows in a sample of the data."""
