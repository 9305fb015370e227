"""Traces: what happens in a loader, as a file for Perfetto and chrome://tracing.

Runs in the consumer. `trace` is what users get and the file, `events` says what each occurrence becomes.
"""
