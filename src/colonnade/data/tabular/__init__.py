"""Tables of any kind of file under a declared schema."""
