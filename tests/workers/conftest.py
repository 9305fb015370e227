"""A test process that plays the worker is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data._utils import worker as torch_worker

from fastq_loader.memory.arena import Arena
from fastq_loader.memory.results import install
from fastq_loader.reading import generators


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A worker of this arena may run in this process."""
    threads = torch.get_num_threads()
    arena = Arena(1)
    with generators.put_back():
        yield arena
    install(None)
    arena.retire([])
    torch_worker._worker_info = None
    torch.set_num_threads(threads)
