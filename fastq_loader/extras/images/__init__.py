"""Images: encoded in the dataset, decoded in a worker or in a batch. Users import
`fastq_loader.images`."""
