"""The consumer's side of one pool of workers: the event loop, and the entrance to it.

Everything here runs in the consumer, inside a call of `iter()`, `next()` or `close()`.
"""
