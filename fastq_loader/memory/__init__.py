"""Shared memory: one mapped file for each pool of workers, and the access to its blocks.

The consumer owns the arena and the pool of its blocks; each worker owns an allocator.
"""
