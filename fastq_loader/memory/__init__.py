"""Shared memory: one mapped file for each pool of workers, and who may write to its blocks or reference them.

The arena and the pool of its blocks are the consumer's; the allocator is the worker's.
"""
