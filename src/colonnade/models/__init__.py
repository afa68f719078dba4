"""Models, written as single-device code without shards, tiers or staleness."""

import colonnade

__getattr__, __dir__, __all__ = colonnade._attach_stub(__name__, __file__)
