"""Copies with non-temporal stores: the same bytes, and only where batches are too large for a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from fastq_loader.memory import allocator, nontemporal
from fastq_loader.memory import arena as arenas
from fastq_loader.memory.nontemporal import address_of
from fastq_loader.reading import collate
from tests.conftest import run_script
from tests.support.datasets import assert_same
from tests.support.pair import Pair, noise, paired
from tests.support.thorough import examples, thorough

pytestmark = pytest.mark.skipif(not arenas.AVAILABLE, reason="this system has no memfd")

BUILT = pytest.mark.skipif(not nontemporal.AVAILABLE, reason="installed without a C compiler, or no x86-64")
PIECE = nontemporal.SMALLEST_PIECE

Copies = list[tuple[int, int]]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    seen: Copies = []
    copy = nontemporal.copy

    def counting(target: int, sources: list[int], nbytes: int) -> None:
        seen.append((len(sources), nbytes))
        copy(target, sources, nbytes)

    monkeypatch.setattr(nontemporal, "copy", counting)
    return seen


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(nontemporal, "SMALLEST_PIECE", 1)
    with paired(nontemporal_from=0) as pair:
        yield pair


@examples(300)
@given(st.integers(0, 130), st.integers(0, 70), st.integers(0, 5), st.data())
def test_only_the_pieces_are_written(nbytes: int, target_at: int, count: int, data: st.DataObject) -> None:
    total = nbytes * count
    target = np.full(target_at + total + 70, 0xEE, np.uint8)
    sources = noise(count * 64 + total + 1, nbytes)
    before = sources.copy()
    starts = [data.draw(st.integers(0, sources.size - nbytes)) for _ in range(count)]
    nontemporal.copy(
        address_of(target) + target_at, [address_of(sources) + start for start in starts], nbytes
    )
    expected = b"".join(bytes(before[start : start + nbytes]) for start in starts)
    assert bytes(target[target_at : target_at + total]) == expected
    assert set(target[:target_at]) | set(target[target_at + total :]) == {0xEE}
    assert bytes(sources) == bytes(before)


class Marked(torch.Tensor):
    pass


def small(index: int) -> torch.Tensor:
    return torch.from_numpy(noise(70_000, index))


def floats(index: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(index).random((3, 9000), np.float32))


def conjugated(index: int) -> torch.Tensor:
    return torch.complex(floats(index), floats(index + 1)).conj()


NONTEMPORAL: dict[str, Callable[[int], torch.Tensor]] = {
    "bytes": small,
    "floats": floats,
    "a part of a tensor": lambda index: torch.from_numpy(noise(90_000, index))[1000:80_000],
}


def one(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    return lambda index: change(floats(index)) if index == 1 else floats(index)


TORCHS_WAY: dict[str, Callable[[int], torch.Tensor]] = {
    "lazily conjugated": conjugated,
    "one longer": lambda index: torch.rand(3, 9000 + index),
    "one transposed": one(lambda sample: sample.t().contiguous().t()),
    "one negated": one(torch._neg_view),
    "one of another dtype": one(torch.Tensor.double),
    "one that requires grad": one(torch.Tensor.requires_grad_),
    "one without memory": one(lambda sample: sample.to("meta")),
    "one of a subclass": one(lambda sample: sample.as_subclass(Marked)),
    "one of another shape": one(lambda sample: sample.view(9000, 3)),
}


def outcome(batch: list[torch.Tensor]) -> Any:
    try:
        return collate.stack_tensors(batch).clone()  # the block's memory goes with the pair
    except Exception as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize("name", NONTEMPORAL)
def test_samples_like_the_batch_are_written_nontemporally(name: str, always: Pair, copies: Copies) -> None:
    batch = [NONTEMPORAL[name](index) for index in range(4)]
    expected = torch.stack(batch)
    assert_same(expected, collate.stack_tensors(batch))
    assert copies == [(4, batch[0].nbytes)]


@pytest.mark.parametrize("name", TORCHS_WAY)
def test_other_samples_go_torchs_way(name: str, copies: Copies) -> None:
    batch = [TORCHS_WAY[name](index) for index in range(3)]
    with paired(nontemporal_from=0) as pair:
        got = outcome(batch)
        assert pair.allocator.is_nontemporal(batch[0].nbytes)
    with paired():
        assert_same(outcome(batch), got)
    assert copies == []


@pytest.mark.parametrize("for_device", [False, True])
def test_what_user_code_made_is_copied_with_nontemporal_stores(for_device: bool, copies: Copies) -> None:
    with paired(for_device, nontemporal_from=0) as pair:
        batch = {"x": floats(1), "few": torch.arange(3), "more": small(2).numpy().copy()}
        assert_same(batch, pair.trip(batch))
    assert sorted(copies) == [(1, 70_000), (1, 108_000)]


class Images(Dataset[Any]):
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        blocks = allocator.current
        return torch.from_numpy(noise(self.nbytes, index)), bool(blocks and blocks.is_nontemporal(PIECE))


@BUILT
@pytest.mark.processes
@thorough(but={"workers": 2, "factor": 1.0})
@pytest.mark.parametrize(("workers", "prefetch", "megabytes"), [(2, 2, 6.5), (1, 6, 4.6)])
@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_batches_that_exceed_the_cache(workers: int, prefetch: int, megabytes: float, factor: float) -> None:
    dataset = Images(int(megabytes * factor * 2**20) // 2)
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "prefetch_factor": prefetch}
    for number, ((images, flags), (expected, _)) in enumerate(
        zip(DataLoader(dataset, **arguments), TorchDataLoader(dataset, **arguments), strict=True)
    ):
        large = factor == 1 and number >= workers  # nobody knows the size of the first ones
        assert flags.tolist() == [large] * 2
        assert torch.equal(images, expected)


@pytest.mark.processes
def test_an_installation_without_the_c_does_without_it() -> None:
    result = run_script(
        """
        import sys
        sys.modules["fastq_loader.memory._nontemporal"] = None  # the import fails
        import torch
        from torch.utils.data import Subset
        from fastq_loader import DataLoader
        from fastq_loader.memory import nontemporal
        from tests.memory.test_nontemporal import Images

        assert not nontemporal.AVAILABLE
        source, target = torch.arange(10), torch.zeros(6, dtype=torch.int64)
        nontemporal.copy(target.data_ptr(), [source.data_ptr() + 16, source.data_ptr() + 40], 24)
        assert target.tolist() == [2, 3, 4, 5, 6, 7]
        data = Subset(Images(20 << 20), range(4))
        for number, (image, nontemporally) in enumerate(DataLoader(data, None, num_workers=1)):
            assert torch.equal(image, data[number][0]) and not nontemporally
        print("as ever")
        """,
        warm=True,
    )
    assert (result.stdout, result.stderr, result.left) == ("as ever\n", "", ())
