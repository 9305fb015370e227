"""Traces: the activity of a loader, as a file for Perfetto.

Runs in the consumer. `trace` has the context manager behind `DataLoader.trace`, and writes the file.
"""
