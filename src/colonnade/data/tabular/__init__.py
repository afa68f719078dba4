"""CSV and Parquet under a declared schema."""
