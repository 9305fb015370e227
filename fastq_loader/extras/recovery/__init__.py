"""Jobs that have to end, and batches that are loaded again."""
