"""Rows B1 to B4, B6, B9 and B10: how long a batch stays valid, whose it is, and what it costs to keep it."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from fastq_loader import DataLoader
from tests.conftest import descendants, held_memory, wait_until
from tests.support.datasets import Made, assert_same, identity
from tests.support.gates import LIMIT
from tests.support.loaders import IMAGE, WORKERS, exactly, image, image_and_label
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes


def ends(batch: torch.Tensor) -> list[float]:
    """The first and the last value."""
    return batch.flatten()[[0, -1]].tolist()


def held_by_thread(batch: torch.Tensor) -> Callable[[], Any]:
    """Keep a batch on the stack of a thread until it is asked for it."""
    box, asked = [batch], threading.Event()

    def run() -> None:
        own = box.pop()
        assert asked.wait(60)
        box.append(own.clone())

    def read() -> torch.Tensor:
        asked.set()
        thread.join()
        return box.pop()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return read


#: Others are in `memory/test_arena.py`.
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "batch": lambda batch: batch,
    "row of a slice": lambda batch: batch[1:][0],
    "strided slice": lambda batch: batch[::2, 1, 5:],
    "one element": lambda batch: batch[1, 0, 0, 0],
    "expanded": lambda batch: batch[:1].expand(7, *IMAGE),
    "as_strided": lambda batch: batch.as_strided((5, 5), (9, 3), 17),
    "unbound": lambda batch: batch.unbind(0)[2],
    "memoryview of numpy": lambda batch: memoryview(batch.numpy().reshape(-1)),
    "numpy and back": lambda batch: torch.from_numpy(batch.numpy()[1:]),
    "dlpack to numpy": np.from_dlpack,
}
#: Each keeps a batch in its own way, and gives it back when it is called.
HOLDERS: dict[str, Callable[[torch.Tensor], Callable[[], Any]]] = {
    "another thread": held_by_thread,
    **{
        name: lambda batch, view=view: functools.partial(identity, view(batch))
        for name, view in VIEWS.items()
    },
}


def test_b1_memory_is_not_reused_while_anything_refers_to_it() -> None:
    """Whatever holds a batch, of many that are held at once, each in another way."""
    iterator = iter(DataLoader(Made(image, 4 * (len(HOLDERS) + 100)), batch_size=4, num_workers=2))
    readers = {name: hold(next(iterator).fill_(-1.0)) for name, hold in HOLDERS.items()}
    for position, batch in enumerate(itertools.islice(iterator, 100), len(HOLDERS)):
        assert batch[0, 0, 0, 0] == 4 * position
        del batch
    for name, read in readers.items():
        values = np.asarray(read())
        assert values.min() == values.max() == -1.0, name


def test_b1_a_batch_is_reused_once_nothing_refers_to_it() -> None:
    """The other side of B1: blocks come back, or the arena would grow with the epoch."""
    loader = DataLoader(Made(image, 800), batch_size=4, num_workers=2)
    addresses = [batch.data_ptr() for batch in loader]
    assert len(addresses) == 200
    assert len(set(addresses)) < 40


def test_b2_ten_times_the_ring_can_be_held_and_let_go_in_any_order() -> None:
    rng = random.Random(0)
    held: list[tuple[int, torch.Tensor]] = []
    for position, batch in enumerate(exactly(300, DataLoader(Made(image, 600), 2, num_workers=2))):
        held.append((position, batch))
        while len(held) > 40:
            held.pop(rng.randrange(len(held)))
        for number, one in rng.sample(held, min(3, len(held))):
            assert ends(one) == [2 * number, 2 * number + 1]


def images_and_labels_of_one_buffer(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one tensor of 1.6 MB that lie 4 kB apart."""
    buffer = torch.full((400_000,), float(index))
    return buffer[1024:], buffer[:8]


def views_of_a_large_tensor(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.full((1_000_000,), float(index))
    return buffer[-3:], buffer[5:8]


def labels_alone(batch: Any) -> Any:
    return None, batch[1]


KEPT: dict[str, tuple[Callable[[int], Any], int | None, Callable[[Any], Any]]] = {
    "labels": (image_and_label, 8, labels_alone),
    "labels in the buffer of the images": (images_and_labels_of_one_buffer, None, labels_alone),
    "views": (views_of_a_large_tensor, None, identity),
    "images": (image_and_label, 8, identity),
}


@thorough(but={"what": ["labels", "views"]})
@pytest.mark.parametrize("what", KEPT)
def test_b3_b6_what_is_kept_of_a_batch_costs_its_own_memory(what: str) -> None:
    """Images are 1.6 MB a batch, large tensors 4 MB: held by a small part, 100 of them add 157 MB or more."""
    make, batch_size, keep = KEPT[what]
    collate = None if batch_size else identity
    loader = DataLoader(Made(make, 132 * (batch_size or 1)), batch_size, num_workers=2, collate_fn=collate)
    kept, held = [], 0
    for position, batch in enumerate(loader):
        assert batch[0].amax() == batch[1].amax()  # a page counts from its first use on
        kept.append(keep(batch))
        del batch
        if position in (30, 130):
            held = held_memory() - held
    assert (held < 60e6) is (what != "images"), f"100 batches hold {held / 1e6:.0f} MB"
    found = torch.cat([labels for _, labels in kept]).unique().tolist()
    assert found == list(range(len(found)))
    assert len(found) in (132, 8 * 132)


def everything(index: int) -> dict[str, Any]:
    array = np.full((100, 200), index)
    return {"large": image(index), "small": torch.arange(5) + index, "label": index, "array": array}


@thorough(but={"workers": 2})
@WORKERS
def test_b4_batches_are_writable_and_edits_reach_nothing_else(workers: int) -> None:
    loader = DataLoader(Made(everything, 24), 4, num_workers=workers, persistent_workers=workers > 0)
    with loader:
        for _ in range(2):
            for position, batch in enumerate(exactly(6, loader)):
                assert_same(default_collate([everything(4 * position + i) for i in range(4)]), batch)
                for leaf in batch.values():
                    leaf.add_(1)
                    leaf.numpy()[...] = -1
                    assert leaf.numpy().flags.writeable
                del batch, leaf


@thorough(after=1)
@pytest.mark.parametrize("closing", ["delete", "break", "close", "with"])
def test_b9_a_batch_outlives_its_loader(closing: str) -> None:
    loader = DataLoader(Made(everything, 16), 4, num_workers=2, persistent_workers=closing != "delete")
    with loader if closing == "with" else contextlib.nullcontext():
        iterator = iter(loader)
        kept = [next(iterator)] if closing == "break" else list(iterator)
    if closing == "close":
        loader.close()
    gone = weakref.ref(loader)
    del loader, iterator
    gc.collect()
    assert gone() is None
    assert wait_until(lambda: not descendants(), LIMIT)
    for position, batch in enumerate(kept):
        assert_same(default_collate([everything(4 * position + i) for i in range(4)]), batch)
        batch["large"].add_(1)
    assert (kept[0]["large"][1] == 2).all()


SIZES = [1_000, 1_000, 5_000_000, 1_000, 0, 20_000, 5_000_000, 300_000, 1_000, 2_000_000]


def growing(index: int) -> torch.Tensor:
    return torch.full((SIZES[index],), index % 100, dtype=torch.uint8 if index % 2 else torch.float32)


@thorough(after=1)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_b10_batches_that_grow_in_mid_epoch_fit(batch_size: int | None) -> None:
    with DataLoader(Made(growing, 10), batch_size, num_workers=2, persistent_workers=True) as loader:
        for _ in range(2):
            for index, batch in enumerate(exactly(10, loader)):
                expected = growing(index) if batch_size is None else growing(index)[None]
                assert batch.dtype == expected.dtype
                assert torch.equal(batch, expected), f"batch {index} of {SIZES[index]} elements"
                del batch, expected
