"""Shared memory: one mapped file for each pool, the blocks in it, and who may write to or look at which.

The arena and its ledger are the consumer's; the allocator is the worker's.
"""
