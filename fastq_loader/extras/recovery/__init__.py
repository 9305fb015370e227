"""Jobs that are told to end, and batches that are loaded again."""
