"""Messages between ranks: how ids, rows, bags and pooled values are packed, and how they travel."""
