"""The loader in the bench with and without non-temporal stores."""

from __future__ import annotations

import pytest
import torch

from bench.peers import LoaderSettings, Unsupported
from bench.peers.fastq import FastqCached, FastqLoader
from bench.workloads import Load
from fastq_loader.memory import nontemporal, results
from tests.support.datasets import Made

BUILT = pytest.mark.skipif(not nontemporal.AVAILABLE, reason="installed without a C compiler, or no x86-64")


def image(index: int) -> tuple[torch.Tensor, bool]:
    """And whether it is about to be written with non-temporal stores."""
    return torch.zeros(100_000), results.use_nontemporal(nontemporal.SMALLEST_PIECE)


IMAGES = Load(Made(image, 24), batch_size=4)


@BUILT
@pytest.mark.processes
@pytest.mark.parametrize(("peer", "expected"), [(FastqLoader, True), (FastqCached, False)])
def test_the_bench_can_do_without(
    peer: type[FastqLoader], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nontemporal, "CACHED", 0)
    loader = peer(IMAGES, LoaderSettings(2, "fork"))
    flags = [flags for _, flags in loader.epoch()]
    loader.close()
    assert all(bool(flag) is expected for batch in flags for flag in batch)
    assert nontemporal.CACHED == 0


def test_the_bench_says_where_everything_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nontemporal, "AVAILABLE", False)
    with pytest.raises(Unsupported, match="through the caches"):
        FastqCached(IMAGES, LoaderSettings(2, "fork"))
