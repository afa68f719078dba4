"""Online serving: raw records to batches, recommendations, and the server."""
