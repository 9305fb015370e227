"""An epoch of a loader: its iterators, with and without workers, its record (`epoch`), what its order depends
on (`samplers`), and the runtime state of the loader (`resources`).

Runs in the consumer.
"""
