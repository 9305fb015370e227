"""What a peer is, and the list of them.

A peer is a loader under measurement. To add one, write a module here that ends in `PEER = <the class>` and
name it in `_MODULES`. Peers are imported by name and only when used, so that none sits in another's memory.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bench.workloads import Load

_MODULES = {
    "torch": "torch_loader",
    "fastq_loader": "fastq",
    "torch, num_workers=0": "torch_inline",
}
PEERS = tuple(_MODULES)


@dataclass(frozen=True)
class LoaderSettings:
    """What a run asks of every loader."""

    num_workers: int
    start_method: str
    prefetch_factor: int = 2  # torch's default


class Peer(ABC):
    """One loader over one load. Workers start with the first epoch and live until `close`."""

    distributions: ClassVar[tuple[str, ...]]  # the packages whose versions are reported
    prefetched: int  # at most so many batches are ready before they are asked for

    @abstractmethod
    def __init__(self, load: Load, settings: LoaderSettings) -> None: ...

    @abstractmethod
    def epoch(self) -> Iterator[Any]:
        """Start an epoch. The one before must have ended."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers, also in the middle of an epoch. The caller drops its iterator first."""


def peer_class(name: str) -> type[Peer]:
    """The class of the peer of that name; ImportError when its package is not there."""
    peer: type[Peer] = importlib.import_module(f"bench.peers.{_MODULES[name]}").PEER
    return peer
