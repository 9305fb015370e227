"""Encoded samples: joined in any loader, whole in slices and pickles, with seeds of their own."""

from __future__ import annotations

import copy
import ctypes
import mmap
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, default_collate

from fastq_loader import DataLoader, Dynamic, NotCached, Replace, Skip, StatefulDataLoader, cached, compare
from fastq_loader.images import DecodeImages, Encoded, EncodedBatch, encoded
from tests.conftest import run_script
from tests.support.loaders import distinct
from tests.support.photographs import file_of, photograph
from tests.support.thorough import thorough

FILES = [file_of(photograph(1, 1 + number % 7, number), "PNG") for number in range(24)]
SMALL, LARGE = FILES[0], file_of(photograph(400, 400), "BMP")


class Files(Dataset[Any]):
    """A file, its number, and the file again."""

    def __len__(self) -> int:
        return len(FILES)

    def __getitem__(self, index: int) -> tuple[Encoded, int, Encoded]:
        return encoded(FILES[index], str(index)), index, encoded(FILES[index])


class Fragile(Files):
    """Some of its samples cannot be read, after their first file was."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index % 5 == 3:
            raise OSError("lost")
        return sample


class AtOnce(Files):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Nested(Files):
    """It reads from another loader for each sample."""

    def __getitem__(self, index: int) -> Any:
        list(DataLoader(Files(), 12))
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return map(Files().__getitem__, range(first, len(FILES), step))


def content(batch: EncodedBatch) -> list[bytes]:
    return [bytes(file.data) for file in batch]


def seeds_of(loader: Any) -> list[Any]:
    return distinct(
        (first.seeds.tolist(), second.seeds.tolist(), numbers.tolist()) for first, numbers, second in loader
    )


@pytest.mark.parametrize("loader", [TorchDataLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_files_arrive_as_they_were_read(loader: Any, workers: int) -> None:
    batches = list(loader(Files(), 5, num_workers=workers))
    assert [content(first) for first, _, _ in batches] == [FILES[at : at + 5] for at in range(0, 24, 5)]
    assert [name for first, _, _ in batches for name in first.names] == list(map(str, range(24)))


@pytest.mark.parametrize(
    "source",
    [
        *(SMALL, bytearray(SMALL), memoryview(SMALL), multiprocessing.RawArray("B", SMALL)),
        *((ctypes.c_char * len(SMALL)).from_buffer_copy(SMALL), memoryview(SMALL).cast("b")),
        np.frombuffer(SMALL, "S1"),
        np.repeat(np.frombuffer(SMALL, np.uint8), 2)[::2],
        torch.tensor(list(SMALL), dtype=torch.uint8),
    ],
)
def test_contents_may_be_given_in_any_form(source: Any) -> None:
    file = encoded(source, name="x")
    assert (bytes(file.data), file.name, len(file)) == (SMALL, "x", len(SMALL))
    assert content(default_collate([file, file])) == [SMALL] * 2


def test_contents_that_change_or_are_closed_are_copied(tmp_path: Path) -> None:
    buffer = bytearray(SMALL)
    file = encoded(memoryview(buffer)[: len(SMALL)])
    buffer[:] = bytes(len(SMALL))
    buffer.clear()
    (tmp_path / "file").write_bytes(SMALL)
    with (
        (tmp_path / "file").open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        files = [file, encoded(mapped)]
    assert content(default_collate(files)) == [SMALL] * 2


def test_a_path_is_read_and_is_the_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SMALL)
    for given in (path, str(path)):
        assert (encoded(given).name, encoded(given).data) == (str(path), SMALL)
    with pytest.raises(FileNotFoundError, match="missing"):
        encoded(tmp_path / "missing")


@pytest.mark.parametrize(
    "source", [3, None, np.zeros(3), torch.zeros(2, 2, dtype=torch.uint8), memoryview(np.zeros(8, np.int32))]
)
def test_what_is_no_file_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=r"encoded\(source="):
        encoded(source)


def test_slices_and_pickles_have_their_own_part_only() -> None:
    batch = default_collate([encoded(LARGE, "large"), encoded(SMALL, "small")])
    part = batch[1:]
    assert (content(part), part.names, part.seeds.tolist()) == ([SMALL], ("small",), batch.seeds.tolist()[1:])
    assert part.data.base is None or part.data.base.nbytes == len(SMALL)
    assert len(pickle.dumps(part)) < 2000
    assert len(pickle.dumps(batch[1])) < 500
    assert content(pickle.loads(pickle.dumps(batch))) == content(batch)
    assert bytes(batch[-1].data) == SMALL
    assert len(batch) == 2
    with pytest.raises(IndexError):
        batch[2]


SHUFFLED = {"shuffle": True, "batch_size": 5}


def seeded(dataset: Any, **options: Any) -> StatefulDataLoader[Any]:
    torch.manual_seed(5)
    return StatefulDataLoader(
        dataset,
        **{**SHUFFLED, "schedule": "round_robin", "generator": torch.Generator().manual_seed(3), **options},
    )


@thorough(after=4)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2, "schedule": Dynamic()},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
        {"num_workers": 2, "pin_memory": False, "persistent_workers": True},
    ],
)
@pytest.mark.parametrize("dataset", [Files, AtOnce])
def test_seeds_do_not_depend_on_who_reads(dataset: Any, options: dict[str, Any]) -> None:
    assert seeds_of(seeded(dataset(), **options)) == seeds_of(seeded(dataset()))


def test_no_two_samples_and_no_two_epochs_share_a_seed() -> None:
    loader = seeded(Files(), num_workers=2)
    epochs = [seeds_of(loader), seeds_of(loader)]
    every = [seed for epoch in epochs for batch in epoch for seeds in batch[:2] for seed in seeds]
    assert len(set(every)) == len(every) == 2 * 2 * len(FILES)


def test_a_loader_inside_of_a_dataset_changes_no_seed() -> None:
    assert seeds_of(seeded(Nested())) == seeds_of(seeded(Files()))


def test_seeds_draw_from_no_generator() -> None:
    def after(dataset: Any) -> Any:
        torch.manual_seed(0)
        list(DataLoader(dataset, 4))
        return torch.rand(3).tolist()

    assert after(Files()) == after(range(len(FILES)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_goes_on_with_its_seeds(workers: int) -> None:
    whole = seeds_of(seeded(Files(), num_workers=workers))
    began = seeded(Files(), num_workers=workers)
    batches = iter(began)
    next(batches), next(batches)
    state = began.state_dict()
    resumed = seeded(Files(), num_workers=workers)
    torch.rand(7)
    resumed.load_state_dict(state)
    assert seeds_of(resumed) == whole[2:]


@pytest.mark.filterwarnings("ignore:sample:fastq_loader.BadSampleFound")
@pytest.mark.parametrize("errors", [Skip(limit=None), Replace(limit=None)])
def test_a_sample_that_cannot_be_read_changes_no_others_seed(errors: Any) -> None:
    fragile = seeds_of(seeded(Fragile(), errors=errors))
    assert fragile == seeds_of(seeded(Fragile(), errors=errors, num_workers=2))
    expected = {
        number: seed
        for first, _, at in seeds_of(seeded(Files()))
        for number, seed in zip(at, first, strict=True)
    }
    found = {number: seed for first, _, at in fragile for number, seed in zip(at, first, strict=True)}
    unread = {number for number in range(24) if number % 5 == 3}
    assert isinstance(errors, Replace) or found == {n: s for n, s in expected.items() if n not in unread}


LAZY = """
import torch
from fastq_loader import DataLoader

class Lazy:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        from fastq_loader.images import encoded
        return encoded(FILE)

FILE = {file!r}
for workers in (2, 0):
    torch.manual_seed(0)
    print([batch.seeds.tolist() for batch in DataLoader(Lazy(), 3, num_workers=workers)])
"""


def test_seeds_do_not_depend_on_when_the_module_is_imported() -> None:
    with_workers, without = run_script(LAZY.format(file=SMALL)).stdout.splitlines()
    assert with_workers == without


def test_a_streams_seeds_are_those_of_its_worker() -> None:
    def of(workers: int) -> Any:
        return seeds_of(seeded(Stream(), shuffle=None, num_workers=workers))

    assert of(2) == of(2) != of(0)
    assert len({seed for first, second, _ in of(2) for seed in (*first, *second)}) == 2 * len(FILES)


def test_outside_of_a_loader_the_seed_is_drawn_from_torchs_generator() -> None:
    list(DataLoader(Files(), 4))
    torch.manual_seed(1)
    first = [encoded(SMALL).seed for _ in range(3)]
    torch.manual_seed(1)
    assert first == [encoded(SMALL).seed for _ in range(3)]
    assert len(set(first)) == 3


class FromCache(Files):
    """Its files are read once. `pixels`: images are decoded inside of the cache, which is a mistake."""

    def __init__(self, pixels: Any = None) -> None:
        self.pixels = pixels
        self.read = cached(self.read, limit="10MB")  # type: ignore[method-assign]

    def read(self, index: int) -> Any:
        file = encoded(file_of(photograph(32, 48, index), "PNG"), str(index))
        return file if self.pixels is None else self.pixels(file)

    def __getitem__(self, index: int) -> Any:
        return self.read(index), index, self.read(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_from_a_cache_has_the_seed_that_it_would_have_without(workers: int) -> None:
    dataset = FromCache()
    loader = seeded(dataset, num_workers=workers)
    epochs = [seeds_of(loader) for _ in range(2)]
    without = seeded(Files(), num_workers=workers)
    assert epochs == [seeds_of(without) for _ in range(2)]
    assert dataset.read.statistics().hits  # type: ignore[attr-defined]


class Kept(Files):
    """Its files were read before, and are kept."""

    def __init__(self, pixels: Any = None, copied: Any = lambda file: file) -> None:
        self.files = [encoded(file_of(photograph(32, 48, index), "PNG")) for index in range(len(FILES))]
        self.pixels, self.copied = pixels, copied

    def __getitem__(self, index: int) -> Any:
        file = self.copied(self.files[index])
        return file if self.pixels is None else self.pixels(file)


@pytest.mark.parametrize(
    ("workers", "persistent", "copied"),
    [(0, False, copy.copy), (2, True, lambda file: file)],
)
def test_a_file_that_a_dataset_keeps_has_a_new_seed_in_each_epoch(
    workers: int, persistent: bool, copied: Any
) -> None:
    """Also a copy of it, such as from shared or pickled lists."""
    options: Any = {"num_workers": workers, "persistent_workers": persistent}
    loader = DataLoader(Kept(copied=copied), 5, **options)
    seeds = [seed for _ in range(3) for batch in loader for seed in batch.seeds.tolist()]
    assert len(set(seeds)) == 3 * len(FILES)
    cropped = DataLoader(Kept(DecodeImages(8), copied), 5, **options)
    first, second = (torch.cat(list(cropped)) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_comparison_with_torchs_loader_says_that_crops_differ() -> None:
    found = compare(DataLoader(FromCache(DecodeImages(8)), 5))
    assert "differ on purpose" in str(found)
    assert compare(DataLoader(Kept(DecodeImages(8, scale=None)), 5)).equal
    for collate in (None, list):
        assert compare(DataLoader(Files(), 5, shuffle=True, collate_fn=collate), epochs=2).equal


def test_a_random_crop_is_not_stored_in_a_cache() -> None:
    dataset = FromCache(DecodeImages(8))
    with pytest.warns(NotCached, match="draws from the seed of a sample"):
        list(DataLoader(dataset, 4))
    assert not dataset.read.statistics().values  # type: ignore[attr-defined]
    middle = FromCache(DecodeImages(8, scale=None, mean=(0.5,) * 3, std=(1,) * 3, device="cpu"))
    list(DataLoader(middle, 4))
    assert middle.read.statistics().values == len(FILES)  # type: ignore[attr-defined]
