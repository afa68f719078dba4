"""Search for the sharding and exchange of each table."""
