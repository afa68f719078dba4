"""Lookups: which rows a batch reads, and the output tensors that a model gets from them."""
