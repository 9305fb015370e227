"""Traces: the activity of a loader, as a file for Perfetto and chrome://tracing.

Runs in the consumer. `trace` has the context manager behind `DataLoader.trace`, and writes the file.
"""
