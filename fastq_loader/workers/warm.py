"""Imported last by the server that workers are forked from: what it has imported is not garbage.

A collector that looked at it in each worker would copy every page of it. A SIGTERM to all processes of a job
does not end it before the consumer.
"""

from __future__ import annotations

import gc
import signal

import fastq_loader.workers.main  # noqa: F401

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the consumer keeps it out while this starts
gc.collect()
gc.freeze()
