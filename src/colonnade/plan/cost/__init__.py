"""Cost of a plan: bytes, seconds and memory of each table under each sharding and exchange."""
