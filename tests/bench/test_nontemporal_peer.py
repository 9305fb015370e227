"""The loader in the bench with and without non-temporal stores."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from bench.peers import LoaderSettings, Unsupported
from bench.peers.fastq import FastqCached, FastqLoader
from bench.workloads import Load
from fastq_loader.memory import allocator, nontemporal
from tests.support.pair import noise

BUILT = pytest.mark.skipif(not nontemporal.AVAILABLE, reason="installed without a C compiler, or no x86-64")


class Images(Dataset[tuple[torch.Tensor, bool]]):
    """Images, and whether they are about to be written with non-temporal stores."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        image = torch.from_numpy(noise(100_000, index))
        return image, allocator.use_nontemporal(nontemporal.SMALLEST_PIECE)


@BUILT
@pytest.mark.processes
@pytest.mark.parametrize(("peer", "expected"), [(FastqLoader, True), (FastqCached, False)])
def test_the_bench_can_do_without(
    peer: type[FastqLoader], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nontemporal, "CACHED", 0)
    loader = peer(Load(Images(), batch_size=4), LoaderSettings(2, "fork"))
    flags = [flags for _, flags in loader.epoch()]
    loader.close()
    assert all(bool(flag) is expected for batch in flags for flag in batch)
    assert nontemporal.CACHED == 0


def test_the_bench_says_where_everything_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nontemporal, "AVAILABLE", False)
    with pytest.raises(Unsupported, match="through the caches"):
        FastqCached(Load(Images(), batch_size=4), LoaderSettings(2, "fork"))
