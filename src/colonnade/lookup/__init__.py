"""From a batch to lookups of rows, and from rows to the tensors that a model gets."""
