"""Imported last by the server that workers are forked from: what it has imported is not garbage.

A collector that looked at it in each worker would copy every page of it.
"""

from __future__ import annotations

import gc

import fastq_loader.workers.main  # noqa: F401

gc.collect()
gc.freeze()
