"""fastq_loader.DataLoader, with the very arguments that torch's gets."""

from __future__ import annotations

from bench.peers.torch_loader import TorchInline, TorchLoader
from fastq_loader import DataLoader


class FastqLoader(TorchLoader):
    loader_class = DataLoader

    def close(self) -> None:
        self.loader.close()


class FastqInline(TorchInline, FastqLoader):
    """Without workers."""
