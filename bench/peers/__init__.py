"""What a peer is, and the list of them.

A peer is a loader under measurement. To add one, write a class in a module here and name it in `PEERS`.
Peers are imported by name and only when used, so that none sits in another's memory, and one that is not
installed keeps nobody else from running.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bench.workloads import Load

# Grain's absl warns on import that jax is not installed. This silences the consumer; its workers import Grain
# before anything of ours, and start without stderr (`grain_loaders`).
logging.getLogger("absl").setLevel(logging.ERROR)


class Entry(NamedTuple):
    """Where a peer is to be found, and its name in tables."""

    module: str
    class_name: str
    label: str


PEERS = {
    "torch": Entry("torch_loader", "TorchLoader", "torch"),
    "fastq_loader": Entry("fastq", "FastqLoader", "fastq_loader"),
    "stateful": Entry("stateful", "Stateful", "StatefulDataLoader"),
    "spdl_processes": Entry("spdl_loaders", "SpdlProcesses", "SPDL, processes"),
    "spdl_region": Entry("spdl_loaders", "SpdlRegion", "SPDL, processes, any order"),
    "spdl_threads": Entry("spdl_loaders", "SpdlThreads", "SPDL, threads"),
    "spdl_subprocess": Entry("spdl_loaders", "SpdlSubprocess", "SPDL, threads in a process"),
    "spdl_decoder": Entry("spdl_decoder", "SpdlDecoder", "SPDL, its own decoder"),
    "grain": Entry("grain_loaders", "GrainProcesses", "Grain, processes"),
    "grain_threads": Entry("grain_loaders", "GrainThreads", "Grain, threads"),
    "torch_0": Entry("torch_loader", "TorchInline", "torch, 0 workers"),
    "fastq_loader_0": Entry("fastq", "FastqInline", "fastq_loader, 0 workers"),
}


class Unsupported(Exception):
    """A peer cannot do this: the text says what, and in whose words or why."""


class LoaderSettings(NamedTuple):
    """What a run asks of every loader."""

    num_workers: int
    start_method: str
    prefetch_factor: int = 2  # torch's default
    persistent: bool = True


class Peer(ABC):
    """One loader over one load. Workers start with the first epoch and live until `close`, if they can.

    Attributes:
        own_order: it shuffles by a way of its own, so that its batches hold other samples than torch's.
        prefetched: at most so many batches are ready before they are asked for.
        shards: among how many workers it divides an iterable dataset; 0 is none.
    """

    own_order: bool = False
    prefetched: int = 0
    shards: int = 0

    @abstractmethod
    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        """`Unsupported` is raised where it cannot load this, or not with these settings."""

    @abstractmethod
    def epoch(self) -> Iterator[Any]:
        """Start an epoch. The one before must have ended; a drop-in for torch's loader ends it itself."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers, also in the middle of an epoch. The caller drops its iterator first."""


def peer_class(name: str) -> type[Peer]:
    """The class of the peer of that name; ImportError when its package is not installed."""
    entry = PEERS[name]
    peer: type[Peer] = getattr(importlib.import_module(f"bench.peers.{entry.module}"), entry.class_name)
    return peer


def make_peer(name: str, load: Load, settings: LoaderSettings) -> Peer:
    """A new one of that name."""
    return peer_class(name)(load, settings)


@contextmanager
def without_stderr() -> Iterator[None]:
    """Start processes that write no errors: Grain's import logs in each that jax is missing.

    What is raised in workers comes through their loader to the consumer.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
