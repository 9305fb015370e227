"""Reading a dataset by torch's rules: indices, samples, batches and seeds.

Runs in the workers; without workers, and for the indices, in the consumer.
"""
