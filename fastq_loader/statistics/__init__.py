"""Counters of a loader: where the time of each epoch went, what each worker did, what was copied to a device.

Pure. Events are counted on the consumer's thread, where they happen, and read as immutable snapshots.
"""
