"""What a bench's figures say: ratios, and the table a person reads."""
