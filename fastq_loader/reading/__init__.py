"""Reading a dataset by torch's rules: indices, samples, batches and seeds.

Runs in the workers; in the consumer without workers, and for drawing indices.
"""
