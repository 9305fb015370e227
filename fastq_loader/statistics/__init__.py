"""Counters of a loader: where the time of each epoch went, what each worker did, what was copied to a device.

Pure. Counted on the consumer's thread, where the events happen; read as immutable snapshots.
"""
