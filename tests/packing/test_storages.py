"""Storages in a batch, and reducers that return one: bytes that arrive, and memory that stays shared."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader
from tests.support.late_device import late_device
from tests.support.pair import LARGE, paired


def storages(length: int) -> dict[str, Any]:
    floats, shorts, ints = (
        torch.arange(float(length)),
        torch.arange(length, dtype=torch.int16),
        torch.arange(3),
    )
    return {
        "tensor": floats,
        "its storage": floats.untyped_storage(),
        "a part of it": floats[1:3],
        "again": [floats.untyped_storage()],
        "alone": shorts.untyped_storage(),
        "typed": ints.storage(),
        "legacy": torch.FloatStorage([1.5, 2.5]),
        "empty": torch.UntypedStorage(0),
    }


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("length", [5, LARGE])
def test_storages_arrive_and_share_what_they_shared(length: int) -> None:
    with paired() as pair:
        sent = storages(length)
        arrived = pair.trip(storages(length))
        assert {key: type(value) for key, value in arrived.items()} == {
            key: type(value) for key, value in sent.items()
        }
        for name in ("its storage", "alone", "empty"):
            assert bytes(arrived[name]) == bytes(sent[name])
        assert (arrived["typed"].tolist(), arrived["typed"].dtype) == ([0, 1, 2], torch.int64)
        assert arrived["legacy"].tolist() == [1.5, 2.5]
        arrived["tensor"][1] = 7
        assert arrived["a part of it"][0] == 7
        assert arrived["again"][0].data_ptr() == arrived["its storage"].data_ptr()
        whole = arrived["its storage"]
        del arrived
        assert bytes(whole)[4:8] == bytes(torch.tensor([7.0]).untyped_storage())
        del whole
        assert pair.idle()


class Meta(torch.Tensor):
    """A tensor with a reducer of its own that returns a storage, as MONAI's MetaTensor has."""


def rebuild_meta(storage: torch.UntypedStorage, size: Any, stride: Any, attributes: Any) -> Meta:
    made = torch.empty(0).set_(storage, 0, size, stride).as_subclass(Meta)
    vars(made).update(attributes)
    return made


def reduce_meta(value: Meta) -> Any:
    return rebuild_meta, (value.untyped_storage(), value.size(), value.stride(), vars(value))


@pytest.fixture
def registered() -> Iterator[None]:
    ForkingPickler.register(Meta, reduce_meta)
    yield
    del ForkingPickler._extra_reducers[Meta]  # type: ignore[attr-defined]


def meta_samples(count: int) -> list[Any]:
    def sample(number: int) -> Meta:
        made = torch.full((50, 60), float(number)).as_subclass(Meta)
        made.affine = number  # type: ignore[attr-defined]
        return made

    return [[sample(number), sample(number).t()] for number in range(count)]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_h4_a_reducer_that_returns_a_storage_arrives(workers: int, registered: None) -> None:
    torchs, ours = (
        list(kind(meta_samples(5), 1, num_workers=workers, collate_fn=lambda batch: batch))
        for kind in (torch.utils.data.DataLoader, DataLoader)
    )
    for (expected,), (actual,) in zip(torchs, ours, strict=True):
        assert [type(part) for part in actual] == [Meta, Meta]
        assert [part.affine for part in actual[:1]] == [part.affine for part in expected[:1]]
        assert all(
            torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(actual, expected, strict=True)
        )


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_h4_with_a_device_storages_stay_on_the_host(
    workers: int, registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collate(batch: list[Any]) -> list[Any]:
        return [*batch[0], torch.ones(4), torch.arange(6.0).untyped_storage()]

    expected = [collate(batch) for batch in zip(meta_samples(5), strict=True)]
    with late_device(monkeypatch):
        loader = DataLoader(meta_samples(5), 1, num_workers=workers, collate_fn=collate, device="cuda")
        with loader:
            for batch, wanted in zip(loader, expected, strict=True):
                assert [type(part) for part in batch] == [type(part) for part in wanted]
                assert all(torch.equal(a, b) for a, b in zip(batch[:3], wanted[:3], strict=True))
                assert bytes(batch[3]) == bytes(wanted[3])
                del batch
