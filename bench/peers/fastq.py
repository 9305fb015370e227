"""fastq_loader.DataLoader, with the very arguments that torch's gets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from bench.peers import LoaderSettings, Unsupported
from bench.peers.torch_loader import TorchInline, TorchLoader
from bench.workloads import Load
from fastq_loader import DataLoader


class FastqLoader(TorchLoader):
    distributions = ("fastq-loader", "pyzmq", "msgpack")
    loader_class = DataLoader

    def close(self) -> None:
        self.loader.close()


class FastqInline(TorchInline, FastqLoader):
    """Without workers."""


class FastqCached(FastqLoader):
    """With every batch written through the caches, however large: what stores past them gain."""

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        from fastq_loader.memory import nontemporal  # here, because an older package may lack it

        if not nontemporal.AVAILABLE:
            raise Unsupported("this installation writes everything through the caches")
        self._module = nontemporal
        super().__init__(load, settings)

    def epoch(self) -> Iterator[Any]:
        usual, self._module.CACHED = self._module.CACHED, math.inf
        try:
            return super().epoch()  # the workers start here
        finally:
            self._module.CACHED = usual
