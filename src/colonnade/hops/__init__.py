"""Exchanges as values without torch: kinds of hops, what they send and compute, and the links that carry it."""
