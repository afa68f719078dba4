"""Models: single-device code that knows nothing of shards, tiers or staleness."""
