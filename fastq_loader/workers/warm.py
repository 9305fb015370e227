"""Imported last by the server that workers are forked from: what it has imported is not garbage.

A collector that looked at it in each worker would copy every page of it. The generators that come with torch
and numpy are new in each worker, as if it had imported these itself: the user's modules may draw before it is
seeded. A SIGTERM to all processes of a job does not end the server: the consumer kept it out at the start.
"""

from __future__ import annotations

import gc
import os

import numpy as np
import torch

import fastq_loader.workers.main  # noqa: F401

_server = os.getpid()


def _renew_generators() -> None:
    if os.getppid() == _server:  # a worker's own children inherit what it has
        np.random.seed()
        torch.default_generator.seed()


os.register_at_fork(after_in_child=_renew_generators)
gc.collect()
gc.freeze()
