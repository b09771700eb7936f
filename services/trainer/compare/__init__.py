"""Several algorithms over the same recorded batches, without an update."""
