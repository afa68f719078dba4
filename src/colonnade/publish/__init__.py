"""Weights that leave a run or enter one: exports, publications for predictors, mirrors, rows by hand."""
