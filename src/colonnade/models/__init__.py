"""Models, written as single-device code without shards, tiers or staleness."""
