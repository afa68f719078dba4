"""Tabular files of any format (CSV, Parquet, libsvm, TFRecord) read under a declared schema."""
