"""What torch's rules say about reading a dataset: indices, samples, batches and seeds.

Runs in the workers; without workers, and for the indices, in the consumer.
"""
