"""The consumer's side of one pool of workers: the event loop, and who may enter it.

Everything here runs in the consumer, inside a call of `iter()`, `next()` or `close()`.
"""
