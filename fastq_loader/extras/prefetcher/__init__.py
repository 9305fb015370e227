"""`Prefetcher`: copies batches of any loader to a device during the previous step."""
