"""Messages between ranks: how ids, rows, bags and pooled values are packed, encoded and sent."""
