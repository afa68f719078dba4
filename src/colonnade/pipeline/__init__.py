"""Pipeline of a collection: batches in flight between the reader and the update of their rows."""
