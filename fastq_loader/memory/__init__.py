"""Shared memory: one mapped file for each pool of workers, and who may write to its blocks or reference them.

The arena, its ledger and the pool around them are the consumer's; the allocator is the worker's.
"""
