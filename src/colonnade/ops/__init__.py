"""What the native core computes, written slowly: `reference` is its definition."""
