"""Rows B1 to B10: what the user gets, how long it stays valid, and what it costs to keep it."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import functools
import gc
import itertools
import pathlib
import random
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

import fastq_loader
from fastq_loader import DataLoader
from tests.conftest import descendants
from tests.support.datasets import (
    Colour,
    Count,
    FrozenRecord,
    Keyed,
    Level,
    Made,
    MapDataset,
    Name,
    Opaque,
    Point,
    Record,
    Slotted,
    Tagged,
    assert_same,
    describe,
    dict_sample,
    difference,
    extent,
    identity,
    namedtuple_sample,
    numpy_sample,
)

IMAGE = (3, 128, 128)
"""196,608 bytes in float32: more than the 64 KiB from which a tensor has shared memory of its own."""

WORKERS = pytest.mark.parametrize("workers", [0, 2])

PROTOTYPES = pytest.mark.filterwarnings(
    "ignore:.*(prototype stage|beta state|Sparse invariant checks|TypedStorage).*:UserWarning",
    "ignore:.*(quantized dtypes|torch.ao.quantization).*:UserWarning",
    "ignore:.*(quantiz|TypedStorage).*:DeprecationWarning",
)
"""torch warns that quantized, nested and sparse tensors are unfinished, unchecked or on their way out."""


def image(index: int) -> torch.Tensor:
    return torch.full(IMAGE, float(index))


def image_and_label(index: int) -> tuple[torch.Tensor, int]:
    return image(index), index


def summed_pss() -> int:
    """Bytes of memory that this process and its children hold; a shared page is counted once."""
    total = 0
    for pid in ["self", *descendants()]:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return 1024 * total


# B1, B2: memory is not reused while anyone looks


def from_autograd(batch: torch.Tensor) -> Callable[[], Any]:
    """Keep a batch only as what autograd saved for the backward pass."""
    weight = torch.ones_like(batch, requires_grad=True)
    result = (weight * batch).sum()

    def gradient() -> torch.Tensor:
        result.backward()
        assert weight.grad is not None
        return weight.grad

    return gradient


def from_storage(batch: torch.Tensor) -> Callable[[], Any]:
    storage = batch.untyped_storage()
    offset, size = batch.storage_offset(), batch.numel()
    return lambda: torch.tensor([], dtype=torch.float32).set_(storage, offset, (size,))


class Reader(threading.Thread):
    """A thread that keeps a batch on its own stack until it is asked for it."""

    def __init__(self, batch: torch.Tensor) -> None:
        super().__init__(daemon=True)
        self.handed_over = [batch]
        self.asked = threading.Event()
        self.start()

    def run(self) -> None:
        own = self.handed_over.pop()
        assert self.asked.wait(60)
        self.handed_over.append(own.clone())

    def __call__(self) -> torch.Tensor:
        self.asked.set()
        self.join()
        return self.handed_over.pop()


def looking_through(view: Any) -> Callable[[], Any]:
    """Keep a view and nothing else."""
    return lambda: view


HOLDERS: dict[str, Callable[[torch.Tensor], Callable[[], Any]]] = {
    "batch": looking_through,
    "row": lambda batch: looking_through(batch[3]),
    "strided slice": lambda batch: looking_through(batch[::2, 1, 5:]),
    "one element": lambda batch: looking_through(batch[1, 0, 0, 0]),
    "transposed": lambda batch: looking_through(batch.transpose(0, 3)),
    "expanded": lambda batch: looking_through(batch[:1].expand(7, *IMAGE)),
    "flattened": lambda batch: looking_through(batch.view(-1)),
    "other dtype": lambda batch: looking_through(batch.view(torch.int32).view(torch.float32)),
    "as_strided": lambda batch: looking_through(batch.as_strided((5, 5), (9, 3), 17)),
    "detached": lambda batch: looking_through(batch.detach()),
    "data": lambda batch: looking_through(batch.data),
    "parameter": lambda batch: looking_through(torch.nn.Parameter(batch)),
    "unbound": lambda batch: looking_through(batch.unbind(0)[2]),
    "chunk": lambda batch: looking_through(batch.chunk(2)[1]),
    "storage": from_storage,
    "autograd": from_autograd,
    "numpy": lambda batch: looking_through(batch.numpy()),
    "slice of numpy": lambda batch: looking_through(batch.numpy()[2:, :, ::3]),
    "memoryview of numpy": lambda batch: looking_through(memoryview(batch.numpy().reshape(-1))),
    "numpy and back": lambda batch: looking_through(torch.from_numpy(batch.numpy()[1:])),
    "dlpack": lambda batch: looking_through(torch.from_dlpack(batch)),
    "dlpack to numpy": lambda batch: looking_through(np.from_dlpack(batch)),
    "dlpack capsule": lambda batch: functools.partial(
        torch.utils.dlpack.from_dlpack, torch.utils.dlpack.to_dlpack(batch)
    ),
    "another thread": Reader,
}


@pytest.mark.processes
@pytest.mark.parametrize("holder", HOLDERS)
def test_b1_memory_is_not_reused_while_someone_looks_at_it(holder: str) -> None:
    loader = DataLoader(Made(image, 420), batch_size=4, num_workers=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    read = HOLDERS[holder](next(iterator).fill_(-1.0))
    for position, batch in enumerate(itertools.islice(iterator, 100), 4):
        assert batch[0, 0, 0, 0] == 4 * position
        del batch
    seen = read()
    values = seen.detach().numpy() if isinstance(seen, torch.Tensor) else np.asarray(seen)
    assert values.min() == values.max() == -1.0


@pytest.mark.processes
def test_b1_a_batch_is_reused_once_nobody_looks() -> None:
    """The other side of B1: blocks come back, or the arena would grow with the epoch."""
    loader = DataLoader(Made(image, 800), batch_size=4, num_workers=2)
    addresses = [batch.data_ptr() for batch in loader]
    assert len(addresses) == 200
    assert len(set(addresses)) < 40


@pytest.mark.processes
def test_b1_views_of_views_and_copies_of_the_tree_hold_on() -> None:
    loader = DataLoader(Made(dict_image, 404), batch_size=4, num_workers=2)
    iterator = iter(loader)
    batch = next(iterator)
    kept = {"inner": batch["pair"][0][1:][0], "tree": dict(batch)["pair"][1]}
    del batch
    for _ in iterator:
        pass
    assert (kept["inner"] == 1).all()
    assert (kept["tree"][2] == 2.5).all()


def dict_image(index: int) -> dict[str, Any]:
    return {"pair": (image(index), image(index) + 0.5), "index": index}


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_b2_a_list_of_all_batches_is_right(persistent: bool) -> None:
    with DataLoader(Made(image_and_label, 160), 2, num_workers=2, persistent_workers=persistent) as loader:
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == 80
            for position, (images, labels) in enumerate(batches):
                assert labels.tolist() == [2 * position, 2 * position + 1]
                for reduced in (images.amax((1, 2, 3)), images.amin((1, 2, 3))):
                    assert torch.equal(reduced, labels.float())
            del batches, images, labels


@pytest.mark.processes
def test_b2_ten_times_the_ring_can_be_held_and_let_go_in_any_order() -> None:
    rng = random.Random(0)
    held: list[tuple[int, torch.Tensor]] = []
    for position, batch in enumerate(DataLoader(Made(image, 600), 2, num_workers=2, prefetch_factor=2)):
        held.append((position, batch))
        while len(held) > 40:
            held.pop(rng.randrange(len(held)))
        for number, one in rng.sample(held, min(3, len(held))):
            assert one.flatten()[[0, -1]].tolist() == [2 * number, 2 * number + 1]


# B3: keeping a small thing keeps a small thing


@pytest.mark.processes
@pytest.mark.parametrize("collate", [None, identity], ids=["default collate", "user collate"])
def test_b3_keeping_the_labels_keeps_the_labels_memory(collate: Callable[[Any], Any] | None) -> None:
    """Images of 1.6 MB a batch: kept alive by their labels, 100 batches would add 157 MB."""
    dataset, size = Made(image_and_label, 8 * 150), 8
    if collate is identity:
        dataset, size = Made(collated_images, 150), None
    loader = DataLoader(dataset, batch_size=size, num_workers=2, collate_fn=collate)
    labels = []
    for position, (images, label) in enumerate(loader):
        assert images.amax((1, 2, 3)).equal(label.float())  # a page counts from its first use on
        labels.append(label)
        del images, label
        if position == 30:
            before = summed_pss()
        if position == 130:
            grown = summed_pss() - before
    assert grown < 60e6, f"100 kept labels hold {grown / 1e6:.0f} MB"
    assert torch.cat(labels).tolist() == list(range(1200))


def collated_images(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(8 * index, 8 * index + 8)
    return numbers.float().view(8, 1, 1, 1).expand(8, *IMAGE).contiguous(), numbers


@pytest.mark.processes
def test_b3_the_measurement_sees_kept_images() -> None:
    """What the row measures is there to be measured: 40 kept batches of images are 63 MB.

    Up to a ring's worth of them goes into blocks that were there before.
    """
    loader = DataLoader(Made(image_and_label, 8 * 60), batch_size=8, num_workers=2)
    kept = []
    for position, (images, label) in enumerate(loader):
        assert images.amax((1, 2, 3)).equal(label.float())
        if position == 10:
            before = summed_pss()
        if position >= 10:
            kept.append(images)
        if position == 50:
            assert summed_pss() - before > 40e6


def images_and_labels_of_one_buffer(index: int) -> dict[str, torch.Tensor]:
    """Two views of one tensor of 1.6 MB that lie 4 kB apart."""
    buffer = torch.full((400_000,), float(index))
    return {"image": buffer[1024:], "label": buffer[:8]}


@pytest.mark.processes
def test_b3_labels_cut_from_the_buffer_of_the_images_do_not_keep_it() -> None:
    loader = DataLoader(
        Made(images_and_labels_of_one_buffer, 150), batch_size=None, num_workers=2, collate_fn=identity
    )
    labels = []
    for position, batch in enumerate(loader):
        assert batch["image"].amax() == position
        labels.append(batch.pop("label"))
        del batch
        if position == 30:
            before = summed_pss()
        if position == 130:
            grown = summed_pss() - before
    assert grown < 60e6, f"100 kept labels hold {grown / 1e6:.0f} MB"
    assert [label.unique().tolist() for label in labels] == [[index] for index in range(150)]


# B4: batches are the user's own


@pytest.mark.processes
@WORKERS
def test_b4_batches_are_writable_and_edits_reach_nothing_else(workers: int) -> None:
    loader = DataLoader(
        Made(everything, 24), batch_size=4, num_workers=workers, persistent_workers=workers > 0
    )
    with loader:
        for _ in range(2):
            for position, batch in enumerate(loader):
                assert_same(default_collate([everything(4 * position + i) for i in range(4)]), batch)
                batch["large"].add_(1)
                batch["small"].add_(1)
                batch["label"].numpy()[...] = -1
                batch["large"].numpy()[0] = 7
                assert batch["large"].numpy().flags.writeable
                del batch


def everything(index: int) -> dict[str, Any]:
    return {"large": image(index), "small": torch.arange(5) + index, "label": index}


@pytest.mark.processes
def test_b4_arrays_are_writable_and_resizable_in_place_where_torchs_are() -> None:
    loader = DataLoader(Made(arrays, 8), batch_size=None, num_workers=2, collate_fn=identity)
    for index, (small, large) in enumerate(loader):
        for one in (small, large):
            assert type(one) is np.ndarray
            assert (one == index).all()
            one += 1
            one[...] = -1


def arrays(index: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(10, index), np.full((100, 200), index)


@pytest.mark.processes
def test_b4_edits_of_one_batch_do_not_reach_another_held_one() -> None:
    held = []
    for batch in DataLoader(Made(image, 60), batch_size=2, num_workers=2):
        held.append(batch.add_(0.5))
        if len(held) > 1:
            held[-2].mul_(2)
    for position, batch in enumerate(held[:-1]):
        assert batch.flatten()[[0, -1]].tolist() == [4 * position + 1, 4 * position + 3]


# B5: every kind of tensor


class Marked(torch.Tensor):
    """A tensor subclass."""


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


@functools.cache
def tensor_cases() -> dict[str, Callable[[], torch.Tensor]]:
    """Name → a function that makes the tensor in the worker."""
    base = numbers(3, 4)
    cases: dict[str, Callable[[], torch.Tensor]] = {
        "transposed": lambda: numbers(3, 4).t(),
        "transposed and large": lambda: numbers(300, 400).t(),
        "permuted": lambda: numbers(2, 3, 4).permute(2, 0, 1),
        "channels_last": lambda: numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "channels_last and large": lambda: numbers(2, 3, 90, 90).to(memory_format=torch.channels_last),
        "channels_last_3d": lambda: numbers(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        "every other row": lambda: numbers(8, 4)[::2],
        "every other row and large": lambda: numbers(800, 400)[::2],
        "a column": lambda: numbers(8, 4)[:, 1],
        "expanded": lambda: numbers(1, 4).expand(5, 4),
        "expanded from one value": lambda: torch.tensor(2.5).expand(300, 300),
        "overlapping itself": lambda: numbers(12).as_strided((5, 4), (2, 1)),
        "an offset into a storage": lambda: numbers(100)[37:41],
        "0-dim": lambda: torch.tensor(3.5),
        "empty": lambda: torch.empty(0),
        "empty with sizes": lambda: torch.empty(3, 0, 5),
        "one element": lambda: torch.ones(1, 1, 1),
        "ones in its shape": lambda: numbers(4).as_strided((1, 4, 1), (99, 1, 77)),
        "nan and negative zero": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
        "sparse COO": lambda: base.to_sparse(),
        "sparse COO, uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,)),
        "sparse COO, large": lambda: numbers(200, 200).to_sparse(),
        "sparse CSR, large": lambda: numbers(200, 200).to_sparse_csr(),
        "sparse CSR": lambda: base.to_sparse_csr(),
        "sparse CSC": lambda: base.to_sparse_csc(),
        "sparse BSR": lambda: numbers(4, 4).to_sparse_bsr((2, 2)),
        "nested": lambda: torch.nested.nested_tensor([numbers(2, 3), numbers(4, 3)]),
        "nested, jagged": lambda: torch.nested.nested_tensor(
            [numbers(2, 3), numbers(4, 3)], layout=torch.jagged
        ),
        "quantized": lambda: torch.quantize_per_tensor(base, 0.1, 2, torch.quint8),
        "quantized per channel": lambda: torch.quantize_per_channel(
            base, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
        "leaf that requires grad": lambda: numbers(3, 4).requires_grad_(),
        "large leaf that requires grad": lambda: numbers(300, 400).requires_grad_(),
        "parameter": lambda: torch.nn.Parameter(numbers(3, 4)),
        "frozen parameter": lambda: torch.nn.Parameter(numbers(3, 4), requires_grad=False),
        "subclass": lambda: numbers(3, 4).as_subclass(Marked),
        "large subclass": lambda: numbers(300, 400).as_subclass(Marked),
        "conjugated lazily": lambda: torch.complex(base, base + 1).conj(),
        "negated lazily": lambda: torch.complex(base, base + 1).conj().imag,
        "meta": lambda: torch.empty(3, 4, device="meta"),
        "made from numpy": lambda: torch.from_numpy(np.arange(6.0)),
        "made from a buffer": lambda: torch.frombuffer(bytearray(range(8)), dtype=torch.int16),
        "in shared memory already": lambda: numbers(3, 4).share_memory_(),
    }
    dtypes = (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
    for dtype in dtypes:
        cases[str(dtype)] = functools.partial(torch.Tensor.to, numbers(5, 3) % 2, dtype)
        cases[f"{dtype} and large"] = functools.partial(torch.Tensor.to, numbers(700, 200) % 2, dtype)
    return cases


@pytest.fixture(scope="module", autouse=True)
def _prototypes_made_once() -> None:
    """The first jagged tensor of a process makes torch create a folder, which is no leak of a loader."""
    make_tensor("nested, jagged", 0)


def make_tensor(name: str, index: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototype kinds of tensors warn where they are made
        return tensor_cases()[name]()


def outcome(kind: type, name: str, workers: int, collate: Callable[[Any], Any] | None) -> Any:
    """Batches of two samples of one case, described; or the error."""
    dataset = Made(functools.partial(make_tensor, name), 2)
    try:
        (batch,) = kind(dataset, batch_size=2, num_workers=workers, collate_fn=collate)
        return describe(batch)
    except RuntimeError as error:
        error.with_traceback(None)  # it leads to the iterator
        return error


@pytest.mark.processes
@PROTOTYPES
@pytest.mark.parametrize("name", tensor_cases())
def test_b5_a_user_collates_tensors_arrive_as_without_workers(name: str) -> None:
    """torch's own workers do this for nearly all kinds: they lose lazy conjugation and quantizers."""
    expected = outcome(TorchDataLoader, name, 0, identity)
    assert not isinstance(expected, RuntimeError)
    for workers in (0, 2):
        ours = outcome(DataLoader, name, workers, identity)
        found = difference(values_of(expected), values_of(ours), name)
        if not name.endswith("ed lazily"):  # for these a copy of other strides holds the value
            found = difference(expected, ours, name)
        assert found is None, f"{workers} workers: {found}"


@pytest.mark.processes
@PROTOTYPES
@pytest.mark.parametrize("name", tensor_cases())
def test_b5_the_default_collate_gives_what_torchs_workers_give(name: str) -> None:
    """Where torch's workers cannot stack a kind that the main process can, stacking it is right as well."""
    with_none, with_one = (outcome(TorchDataLoader, name, workers, None) for workers in (0, 1))
    ours_with_none, ours = (outcome(DataLoader, name, workers, None) for workers in (0, 2))
    if isinstance(with_none, RuntimeError):
        assert isinstance(ours_with_none, RuntimeError)
        assert isinstance(ours, RuntimeError)
        return
    assert difference(with_none, ours_with_none, name) is None
    if not isinstance(with_one, RuntimeError):
        found = difference(with_one, ours, name)
    elif isinstance(ours, RuntimeError):
        found = None
    else:
        found = difference(with_none, ours, name)
    assert found is None, found


def values_of(described: Any) -> Any:
    """Of a described list of tensors the contents alone."""
    kind, parts = described
    return kind, [part[-1] for part in parts]


def aliases(index: int) -> dict[str, torch.Tensor]:
    x = numbers(6, 8) + index
    return {"a": x, "b": x, "t": x.t(), "row": x[2], "flat": x.view(-1)[5:20], "bits": x.view(torch.int32)}


def large_aliases(index: int) -> dict[str, torch.Tensor]:
    x = numbers(300, 400) + index
    return {"a": x, "b": x, "t": x.t(), "row": x[200], "flat": x.view(-1)[5:20], "bits": x.view(torch.int32)}


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("make", [aliases, large_aliases], ids=["small", "large"])
def test_b5_tensors_that_alias_still_alias(make: Callable[[int], Any], workers: int) -> None:
    loader = DataLoader(Made(make, 4), batch_size=None, num_workers=workers, collate_fn=identity)
    for index, batch in enumerate(loader):
        assert_same(make(index), batch)
        batch["a"].fill_(-1)
        for name in ("b", "t", "row", "flat"):
            assert (batch[name] == -1).all(), f"{name} is a copy"
        batch["bits"].zero_()
        assert not batch["t"].any()


@pytest.mark.processes
@WORKERS
def test_b5_two_halves_of_one_tensor_keep_their_places(workers: int) -> None:
    """Views that touch without overlapping, and views of other element sizes at odd offsets."""
    loader = DataLoader(Made(halves, 3), batch_size=None, num_workers=workers, collate_fn=identity)
    for index, batch in enumerate(loader):
        assert_same(halves(index), batch)


def halves(index: int) -> list[torch.Tensor]:
    x = torch.arange(60_000, dtype=torch.int32) + index
    raw = x.view(torch.uint8)
    return [x[:30_000], x[30_000:], raw[3:11], raw[1:], raw[8:200_000].view(torch.int64), x[7:9], raw[5:5]]


@pytest.mark.processes
def test_b5_the_same_tensor_twice_is_one_tensor() -> None:
    (batch,) = DataLoader(Made(twice, 1), batch_size=None, num_workers=1, collate_fn=identity)
    assert batch["a"] is batch["b"]
    assert batch["list"] is batch["list again"]
    assert batch["objects"][0].value is batch["a"]


def twice(index: int) -> dict[str, Any]:
    x, y = numbers(3), [1, 2]
    return {"a": x, "b": x, "list": y, "list again": y, "objects": [Opaque(x)]}


def rows_of_two_types(index: int) -> torch.Tensor:
    return torch.full((3, 3), index, dtype=[torch.float32, torch.float64, torch.float16][index % 3])


def rows_that_do_not_fit_together(index: int) -> torch.Tensor:
    return torch.full((3, 3), index, dtype=[torch.int64, torch.float32][index % 2])


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("make", [rows_of_two_types, rows_that_do_not_fit_together])
def test_b5_mixed_dtypes_are_stacked_or_refused_as_torch_does(
    make: Callable[[int], Any], size: int, workers: int
) -> None:
    results = []
    for kind in (TorchDataLoader, DataLoader):
        try:
            (batch,) = kind(Made(functools.partial(enlarged, make, size), 6), 6, num_workers=workers)
            results.append(describe(batch))
        except (RuntimeError, TypeError) as error:
            error.with_traceback(None)
            results.append(("refused", type(error)))
    assert difference(*results) is None, difference(*results)


def enlarged(make: Callable[[int], torch.Tensor], size: int, index: int) -> torch.Tensor:
    return make(index).repeat(size, size)


# B6: a view travels as what it looks at


def small_view_of_a_large_tensor(index: int) -> torch.Tensor:
    return torch.full((1_000_000,), float(index))[5:8]


def wide_view_of_a_large_tensor(index: int) -> torch.Tensor:
    """A column: it looks at a million elements' extent, and is 4 bytes wide."""
    return torch.full((1000, 1000), float(index))[:, 0]


@pytest.mark.processes
@pytest.mark.parametrize("keep", ["tensor", "inside an object"])
def test_b6_a_view_transfers_its_extent_and_not_its_storage(keep: str) -> None:
    """40 storages of 4 MB, of which 3 elements each are wanted."""
    collate = identity if keep == "tensor" else Opaque
    loader = DataLoader(
        Made(small_view_of_a_large_tensor, 44), batch_size=None, num_workers=2, collate_fn=collate
    )
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(4)]
    before = summed_pss()
    kept += [next(iterator) for _ in range(36)]
    grown = summed_pss() - before
    views = kept if keep == "tensor" else [one.value for one in kept]
    assert grown < 40e6, f"36 views of 12 bytes hold {grown / 1e6:.0f} MB"
    assert all(view.untyped_storage().nbytes() < 1e5 for view in views)
    assert [view.tolist() for view in views] == [[float(i)] * 3 for i in range(40)]


@pytest.mark.processes
def test_b6_values_and_strides_of_a_view_survive() -> None:
    loader = DataLoader(
        Made(wide_view_of_a_large_tensor, 3), batch_size=None, num_workers=1, collate_fn=identity
    )
    for index, view in enumerate(loader):
        assert_same(wide_view_of_a_large_tensor(index), view)


# B7, B8: containers, objects and collates


def nest(depth: int) -> Any:
    value: Any = torch.tensor(depth)
    for level in range(depth):
        value = [value] if level % 3 == 0 else {"in": value} if level % 3 == 1 else (value, level)
    return value


def with_cycle() -> list[Any]:
    cycle: list[Any] = [1, torch.ones(2)]
    cycle.append(cycle)
    return cycle


def recursive_object() -> Opaque:
    outer = Opaque(None)
    outer.value = {"self": outer, "t": torch.ones(2)}
    return outer


def tagged(items: list[Any]) -> Tagged:
    result = Tagged(items)
    result.tag = "instance"  # type: ignore[misc]
    return result


def structured() -> np.ndarray:
    return np.array([(1, 2.5, "x"), (3, 4.5, "yz")], dtype=[("i", "i4"), ("f", "f8"), ("s", "U3")])


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("size", [3, 100_000])
def test_b7_arrays_of_foreign_byte_order_keep_it(size: int, workers: int) -> None:
    """Pickling, and with it torch's workers, would turn them into native ones."""
    make = functools.partial(np.full, size, dtype=">i4")
    loader = DataLoader(Made(make, 4), batch_size=None, num_workers=workers, collate_fn=identity)
    for index, one in enumerate(loader):
        assert_same(make(index), one)


@functools.cache
def object_cases() -> dict[str, Callable[[], Any]]:
    """Name → a function that makes the batch. Each case is shipped small and next to a large tensor."""
    return {
        "namedtuple": lambda: Point(torch.ones(2), Point(1, "a")),
        "dict with any keys": lambda: {1: "int", "1": "str", (1, 2): torch.ones(1), None: 0, 2.5: 1, b"k": 2},
        "dict with equal-looking keys": lambda: [{True: 1}, {1: 1}, {1.0: 1}, {"1": 1}],
        "dict with subclass keys": lambda: {Name("a"): 1, Level.LOW: 2, np.int64(3): 3, np.str_("b"): 4},
        "dict with huge keys": lambda: {2**70: 1, -(2**70): 2, 2**64: 3},
        "OrderedDict": lambda: collections.OrderedDict(b=torch.ones(1), a=1),
        "defaultdict": lambda: collections.defaultdict(list, a=[torch.ones(1)], b=[]),
        "Counter": lambda: collections.Counter("abca"),
        "dict subclass": lambda: Keyed({1: torch.ones(2), "x": 2}, tag="mine"),
        "list subclass": lambda: tagged([torch.ones(2), 1]),
        "deque": lambda: collections.deque([1, torch.ones(1)], maxlen=5),
        "empty containers": lambda: [[], (), {}, set(), frozenset(), "", b"", None],
        "tuple and list": lambda: [(1, [2, (3,)]), [(), []]],
        "torch.Size": lambda: torch.Size([2, 3]),
        "dataclass": lambda: Record("r", torch.ones(3)),
        "frozen dataclass": lambda: FrozenRecord("f", [torch.ones(3), {"a": 1}]),
        "slots": lambda: Slotted(torch.ones(2)),
        "objects": lambda: [Opaque(torch.ones(2)), Opaque({"n": np.ones(2)}), Opaque(None)],
        "object with large arrays": lambda: Opaque([numbers(200, 200), np.ones((200, 200))]),
        "recursive object": recursive_object,
        "cycle": with_cycle,
        "packed sequence": lambda: pack_sequence([torch.arange(3), torch.arange(2)]),
        "str": lambda: ["", "plain", "ä\U0001f600", "\ud800", "\0", "x" * 200_000],
        "bytes": lambda: [b"", b"\x00\xff", bytes(200_000), bytearray(b"abc")],
        "int": lambda: [0, -1, 2**31, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 2**70, -(2**70)],
        "bool and int": lambda: [True, 1, False, 0, [True], {"t": True}],
        "float": lambda: [0.1, -0.0, float("nan"), float("inf"), 1e308, 5e-324],
        "complex": lambda: [1 + 2j, complex("nan")],
        "sets": lambda: [{1, 2}, frozenset({"a", (1, 2)})],
        "enums": lambda: [Colour.RED, Level.HIGH, {Colour.BLUE: 1}],
        "subclasses of plain types": lambda: [Name("n"), Count(3), [Name("m")]],
        "constants": lambda: [None, ..., NotImplemented, int, range(3), slice(1, 2)],
        "functions": lambda: [len, numbers, collections.OrderedDict],
        "library types": lambda: [
            datetime.datetime(2024, 2, 29, 12),
            decimal.Decimal("1.10"),
            fractions.Fraction(1, 3),
            uuid.UUID(int=5),
            pathlib.PurePosixPath("/a"),
            array.array("i", [1, 2]),
        ],
        "torch types": lambda: [torch.float16, torch.device("cpu"), torch.strided],
        "numpy scalars": lambda: [
            *(np.float16(0.1), np.float64(0.1), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)),
            *(
                np.complex64(1j),
                np.str_("s"),
                np.bytes_(b"b"),
                np.datetime64("2024-02-29"),
                np.float64("nan"),
            ),
        ],
        "numpy arrays": lambda: [
            *(np.arange(6, dtype=dtype).reshape(2, 3) for dtype in ("u1", "i2", "f2", "f8", "c8")),
            *(np.array([True, False]), np.array(5), np.empty((0, 3)), np.array(["a", "bcd"])),
            *(np.array([b"x", b"yz"]), np.array(["2024-02-29"], dtype="M8[D]"), np.array([1], "m8[ns]")),
        ],
        "numpy layouts": lambda: [
            *(np.asfortranarray(np.ones((3, 4))), np.arange(12).reshape(3, 4)[:, 1]),
            *(np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1), np.arange(5)[::-1]),
            *(np.broadcast_to(np.arange(3), (4, 3)), np.ones((3, 1, 4))[:, :, ::2]),
        ],
        "numpy objects": lambda: np.array([1, "a", None, torch.ones(1)], dtype=object),
        "numpy records": lambda: [structured(), structured()[0], structured().view(np.recarray)],
        "numpy, masked": lambda: np.ma.masked_array([1.0, 2.0], mask=[True, False]).filled(7.0),
        "numpy, matrix-like": lambda: np.ones((2, 2)).view(np.ndarray),
        "numpy, read-only": lambda: [read_only(np.ones(3)), read_only(np.ones((200, 200)))],
        "numpy, large": lambda: [
            *(np.arange(40_000.0).reshape(200, 200), np.asfortranarray(np.ones((300, 100)))),
            *(np.arange(80_000).reshape(200, 400)[:, ::2], structured().repeat(20_000)),
        ],
        "nested deep": lambda: nest(40),
        "wide": lambda: {f"key {i}": [torch.tensor(i), i, str(i)] for i in range(300)},
    }


def make_object(name: str, large: bool, index: int) -> Any:
    made = object_cases()[name]()
    return {"case": made, "image": image(index)} if large else made


@pytest.mark.processes
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", object_cases())
def test_b7_a_batch_of_any_python_objects_equals_torchs(name: str, large: bool) -> None:
    dataset = Made(functools.partial(make_object, name, large), 3)
    for workers in (0, 2):
        torchs, ours = (
            list(kind(dataset, batch_size=None, num_workers=workers, collate_fn=identity))
            for kind in (TorchDataLoader, DataLoader)
        )
        assert_same(torchs, ours, f"{workers} workers: {name}")


COLLATED: dict[str, Callable[[int], Any]] = {
    "dict": dict_sample,
    "namedtuple": namedtuple_sample,
    "numpy": numpy_sample,
    "OrderedDict": lambda index: collections.OrderedDict(b=index, a=torch.ones(index * 0 + 2)),
    "defaultdict": lambda index: collections.defaultdict(int, a=index),
    "dict subclass": lambda index: Keyed({1: index, "x": (index, str(index))}, tag=f"sample {index}"),
    "list subclass": lambda index: tagged([index, torch.tensor(index)]),
    "nested lists": lambda index: [[index, [index / 2]], (index, b"b")],
    "bool": lambda index: index % 2 == 0,
    "range": lambda index: range(index, index + 3),
    "large": image_and_label,
    "large numpy": lambda index: np.full((200, 200), index, dtype=np.uint16),
    "torch.Size": lambda index: torch.Size([index, 2]),
    "refused: None": lambda index: None,
    "refused: object": Opaque,
    "refused: unequal lists": lambda index: [0] * (index % 3 + 1),
    "refused: unequal sizes": lambda index: torch.ones(index + 1),
    "refused: text arrays": lambda index: np.array(["a"]),
    "refused: huge": lambda index: 2**70,
}


@pytest.mark.processes
@pytest.mark.parametrize("name", COLLATED)
def test_b7_the_default_collate_keeps_container_types(name: str) -> None:
    for workers in (0, 2):
        seen: list[Any] = []
        for kind in (TorchDataLoader, DataLoader):
            try:
                seen.append(describe(list(kind(Made(COLLATED[name], 7), 3, num_workers=workers))))
            except Exception as error:
                error.with_traceback(None)
                seen.append(("raised", type(error)))
        assert difference(*seen, name) is None, f"{workers} workers: {difference(*seen, name)}"
        assert name.startswith("refused") == (seen[1][0] == "raised")


class PinCounter:
    """An object with a `pin_memory` of its own."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.pinned = 0

    def pin_memory(self) -> PinCounter:
        self.value = self.value.pin_memory()
        self.pinned += 1
        return self


@pytest.mark.processes
@WORKERS
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="pinning needs an accelerator")
def test_b7_pinned_batches_are_pinned_and_equal(workers: int) -> None:
    for make in (dict_sample, namedtuple_sample, image_and_label):
        plain = list(TorchDataLoader(Made(make, 8), 4, num_workers=workers))
        pinned = list(DataLoader(Made(make, 8), 4, num_workers=workers, pin_memory=True))
        assert_same(plain, pinned)
    images, _ = pinned[0]
    assert images.is_pinned()
    custom = DataLoader(
        Made(image, 2), batch_size=None, collate_fn=PinCounter, num_workers=workers, pin_memory=True
    )
    for one in custom:
        assert one.pinned == 1
        assert one.value.is_pinned()


@pytest.mark.processes
@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@WORKERS
def test_b7_pin_memory_without_an_accelerator_changes_nothing(workers: int) -> None:
    plain = list(TorchDataLoader(Made(dict_sample, 8), 4, num_workers=workers))
    assert_same(plain, list(DataLoader(Made(dict_sample, 8), 4, num_workers=workers, pin_memory=True)))
    custom = DataLoader(
        Made(image, 2), batch_size=None, collate_fn=PinCounter, num_workers=workers, pin_memory=True
    )
    assert [one.pinned for one in custom] == [0, 0]


class Celsius:
    """A type that the default collate knows only when it is told."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def collate_celsius(batch: list[Celsius], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.tensor([one.degrees for one in batch])


def collate_tensors_as_list(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
    return {"mine": list(batch)}


@pytest.mark.processes
@WORKERS
def test_b8_types_added_to_torchs_collate_map_are_collated(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Celsius, collate_celsius)
    loader = DataLoader(Made(Celsius, 4), batch_size=2, num_workers=workers)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("given", [None, default_collate], ids=["default", "given as collate_fn"])
def test_b8_an_entry_of_torchs_collate_map_can_be_replaced(
    workers: int, given: Callable[[Any], Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensors_as_list)
    loader = DataLoader(Made(image_and_label, 4), batch_size=2, num_workers=workers, collate_fn=given)
    for position, (images, labels) in enumerate(loader):
        assert labels.tolist() == [2 * position, 2 * position + 1]
        assert_same({"mine": [image(2 * position), image(2 * position + 1)]}, images)


@pytest.mark.processes
def test_b8_a_loader_leaves_torchs_collate_map_alone() -> None:
    before = dict(default_collate_fn_map)
    for workers in (0, 2):
        list(DataLoader(Made(image_and_label, 4), batch_size=2, num_workers=workers))
    assert default_collate_fn_map == before


class Collator:
    """A callable object, as tokenizer libraries use them; it calls torch's own collate inside."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, batch: list[Any]) -> dict[str, Any]:
        images, labels = default_collate(batch)
        return {"images": images * self.scale, "labels": labels, "raw": batch[0][0]}

    def method(self, batch: list[Any]) -> dict[str, Any]:
        return self(batch)


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize(
    "collate",
    [
        Collator(2.0),
        Collator(2.0).method,
        functools.partial(Collator.__call__, Collator(2.0)),
        lambda batch: Collator(2.0)(batch),
    ],
    ids=["object", "method", "partial", "lambda"],
)
def test_b8_user_collates_of_every_shape_work(collate: Callable[[Any], Any], workers: int) -> None:
    loader = DataLoader(Made(image_and_label, 6), batch_size=3, num_workers=workers, collate_fn=collate)
    for position, batch in enumerate(loader):
        labels = torch.arange(3 * position, 3 * position + 3)
        expected = torch.stack([image(index) for index in labels.tolist()]) * 2
        assert_same({"images": expected, "labels": labels, "raw": image(3 * position)}, batch)


def who_am_i(batch: list[Any]) -> Any:
    info = get_worker_info()
    if info is None:
        return None
    return [info.id, info.num_workers, info.seed, type(info).__name__, repr(info.dataset), batch]


@pytest.mark.processes
@WORKERS
def test_b8_get_worker_info_is_torchs_in_dataset_and_collate(workers: int) -> None:
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        torch.manual_seed(3)
        seen.append(list(kind(MapDataset("tensors", 6), 2, num_workers=workers, collate_fn=who_am_i)))
    assert_same(seen[0], seen[1])
    assert get_worker_info() is None, "the consumer is no worker"


def dataset_is_the_workers_own(index: int) -> bool:
    info = get_worker_info()
    assert info is not None
    return info.dataset.make is dataset_is_the_workers_own  # type: ignore[attr-defined]


@pytest.mark.processes
def test_b8_worker_info_names_the_dataset_that_is_read() -> None:
    assert all(DataLoader(Made(dataset_is_the_workers_own, 4), batch_size=None, num_workers=2))


# B9, B10: life after the loader, and growth


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("closing", ["close", "delete", "with", "break"])
def test_b9_a_batch_outlives_its_loader(closing: str, persistent: bool) -> None:
    loader = DataLoader(Made(everything, 16), batch_size=4, num_workers=2, persistent_workers=persistent)
    kept = []
    with loader if closing == "with" else warnings.catch_warnings():
        iterator = iter(loader)
        kept.append(next(iterator))
        if closing != "break":
            kept += list(iterator)
    if closing == "close":
        loader.close()
    gone = weakref.ref(loader)
    del loader, iterator
    gc.collect()
    assert gone() is None
    assert not descendants()
    for position, batch in enumerate(kept):
        assert_same(default_collate([everything(4 * position + i) for i in range(4)]), batch)
        batch["large"].add_(1)
    churn = [torch.full((1_000_000,), 3.0) for _ in range(5)]
    assert (kept[0]["large"][1] == 2).all()
    assert len(churn) == 5


@pytest.mark.processes
def test_b9_batches_of_many_dead_loaders_stay_apart() -> None:
    kept = []
    for seed in range(12):
        loader = DataLoader(Made(functools.partial(shifted_image, seed), 4), batch_size=2, num_workers=1)
        kept.append(next(iter(loader)))
        del loader
        gc.collect()
    for seed, batch in enumerate(kept):
        assert batch.flatten()[[0, -1]].tolist() == [100 * seed, 100 * seed + 1]


def shifted_image(seed: int, index: int) -> torch.Tensor:
    return image(100 * seed + index)


SIZES = [1_000, 1_000, 9_000_000, 1_000, 0, 20_000, 9_000_000, 300_000, 1_000, 2_000_000]


def growing(index: int) -> torch.Tensor:
    return torch.full((SIZES[index],), index % 100, dtype=torch.uint8 if index % 2 else torch.float32)


@pytest.mark.processes
@pytest.mark.parametrize("batch_size", [None, 1])
def test_b10_batches_that_grow_in_mid_epoch_fit(batch_size: int | None) -> None:
    loader = DataLoader(Made(growing, 10), batch_size=batch_size, num_workers=2, persistent_workers=True)
    with loader:
        for _ in range(2):
            for index, batch in enumerate(loader):
                expected = growing(index) if batch_size is None else growing(index)[None]
                assert batch.dtype == expected.dtype
                assert torch.equal(batch, expected), f"batch {index} of {SIZES[index]} elements"
                del batch, expected


# fastq_loader.empty


Samples = list[tuple[torch.Tensor, int]]


def stack_into_empty(batch: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    out = fastq_loader.empty((len(batch), *IMAGE), torch.float32)
    torch.stack([one for one, _ in batch], out=out)
    return out, torch.tensor([label for _, label in batch])


def stack_twice(batch: Samples) -> list[torch.Tensor]:
    first, second = (fastq_loader.empty((len(batch), *IMAGE), torch.float32) for _ in range(2))
    torch.stack([one for one, _ in batch], out=first)
    torch.stack([one + 0.5 for one, _ in batch], out=second)
    return [second, first]


def stack_and_slice(batch: Samples) -> list[torch.Tensor]:
    """Too large a buffer, of which parts travel: a head, a strided part, one that overlaps, a small one."""
    out = fastq_loader.empty((len(batch) + 3, *IMAGE), torch.float32).fill_(-1)
    torch.stack([one for one, _ in batch], out=out[: len(batch)])
    return [out[: len(batch)], out[1 : len(batch)].transpose(1, 3), out[: len(batch), 0], out[0, 0, 0]]


def stack_and_split(batch: Samples) -> list[torch.Tensor]:
    """The parts of one buffer side by side."""
    out, _ = stack_into_empty(batch)
    return list(out.unbind(0))


def stack_and_wrap(batch: Samples) -> Opaque:
    return Opaque({"out": stack_into_empty(batch)[0]})


def stack_into_numpy(batch: Samples) -> np.ndarray:
    out = fastq_loader.empty((len(batch), *IMAGE), torch.float32).numpy()
    np.stack([one.numpy() for one, _ in batch], out=out)
    return out


def stack_and_waste(batch: Samples) -> torch.Tensor:
    """Buffers that do not travel."""
    for _ in range(3):
        fastq_loader.empty((len(batch), *IMAGE), torch.float32).fill_(-7)
    return default_collate(batch)[0]


def stack_in_a_thread(batch: Samples) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(stack_into_empty(batch)[0]))
    thread.start()
    thread.join()
    return found.pop()


def stacked(position: int, size: int = 4) -> torch.Tensor:
    return torch.stack([image(size * position + i) for i in range(size)])


EMPTY_COLLATES: dict[Callable[[Any], Any], Callable[[int], Any]] = {
    stack_into_empty: lambda k: (stacked(k), torch.arange(4 * k, 4 * k + 4)),
    stack_twice: lambda k: [stacked(k) + 0.5, stacked(k)],
    stack_and_slice: lambda k: stack_and_slice([(image(4 * k + i), 0) for i in range(4)]),
    stack_and_split: lambda k: [image(4 * k + i) for i in range(4)],
    stack_and_wrap: lambda k: Opaque({"out": stacked(k)}),
    stack_into_numpy: lambda k: stacked(k).numpy(),
    stack_and_waste: stacked,
    stack_in_a_thread: stacked,
}


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("collate", EMPTY_COLLATES, ids=lambda collate: collate.__name__)
def test_empty_in_a_collate_gives_equal_batches_that_share_nothing(
    collate: Callable[[Any], Any], workers: int
) -> None:
    expected = EMPTY_COLLATES[collate]
    loader = DataLoader(Made(image_and_label, 48), batch_size=4, num_workers=workers, collate_fn=collate)
    kept = []
    for position, batch in enumerate(loader):
        if workers and collate is stack_and_split:
            assert_same(expected(position), [one.clone() for one in batch])
        else:
            assert_same(expected(position), batch)
        kept.append(batch)
    for position, batch in enumerate(kept):  # all of them at once: nobody's memory was given away
        assert difference(plain_values(expected(position)), plain_values(batch)) is None


def plain_values(batch: Any) -> Any:
    """The values alone, without strides and overlaps."""
    if isinstance(batch, torch.Tensor):
        return describe(batch.clone(memory_format=torch.contiguous_format))
    if isinstance(batch, list | tuple):
        return [plain_values(one) for one in batch]
    return describe(batch)


@pytest.mark.processes
def test_empty_twice_in_one_batch_are_two_tensors() -> None:
    for first, second in DataLoader(Made(image_and_label, 16), 4, num_workers=2, collate_fn=stack_twice):
        start, end = extent(first)
        other_start, other_end = extent(second)
        assert end <= other_start or other_end <= start


def image_in_empty(index: int) -> torch.Tensor:
    return fastq_loader.empty(IMAGE, torch.float32).fill_(index)


def two_images_in_empty(index: int) -> dict[str, Any]:
    return {"a": image_in_empty(index), "b": (image_in_empty(-index), index)}


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("batch_size", [None, 4])
def test_empty_in_a_dataset_gives_equal_batches(batch_size: int | None, workers: int) -> None:
    loader = DataLoader(Made(two_images_in_empty, 40), batch_size=batch_size, num_workers=workers)
    kept = list(loader)
    size = batch_size or 1
    for position, batch in enumerate(kept):
        indices = torch.arange(size * position, size * position + size)
        assert batch["a"].shape == ((size, *IMAGE) if batch_size else IMAGE)
        for images, sign in ((batch["a"], 1), (batch["b"][0], -1)):
            rows = images.reshape(size, -1)
            assert torch.equal(rows, (sign * indices.float())[:, None].expand_as(rows))


KEPT_BY_WORKER: list[torch.Tensor] = []
"""In a worker: what its collate function keeps from batch to batch."""


def keep_the_first(batch: Samples) -> list[torch.Tensor]:
    """Keep the first result for good, and ship it again with every batch."""
    out, _ = stack_into_empty(batch)
    if not KEPT_BY_WORKER:
        KEPT_BY_WORKER.append(out)
    return [out, KEPT_BY_WORKER[0]]


def keep_the_last_three(batch: Samples) -> torch.Tensor:
    """Keep results for a while, and look at them later."""
    for kept in KEPT_BY_WORKER:
        assert kept.flatten()[0] == kept.flatten()[1], "a kept tensor was overwritten"
    out, _ = stack_into_empty(batch)
    KEPT_BY_WORKER.append(out)
    del KEPT_BY_WORKER[:-3]
    return out


@pytest.mark.processes
def test_empty_kept_by_the_worker_stays_what_it_was() -> None:
    loader = DataLoader(Made(image_and_label, 100), 4, num_workers=1, collate_fn=keep_the_first)
    kept = []
    for position, (fresh, first) in enumerate(loader):
        assert torch.equal(fresh, stacked(position))
        assert torch.equal(first, stacked(0)), f"batch {position} brought another first batch"
        if position % 4 == 0:
            kept.append((position, fresh, first))
    for position, fresh, first in kept:
        assert torch.equal(fresh, stacked(position))
        assert torch.equal(first, stacked(0))


@pytest.mark.processes
def test_empty_kept_for_a_while_by_the_worker_corrupts_no_batch() -> None:
    loader = DataLoader(Made(image_and_label, 160), 4, num_workers=2, collate_fn=keep_the_last_three)
    held: collections.deque[tuple[int, torch.Tensor]] = collections.deque(maxlen=5)
    for position, batch in enumerate(loader):
        held.append((position, batch))
        for number, one in held:
            assert torch.equal(one[:, 0, 0, 0], torch.arange(4 * number, 4 * number + 4).float())


@pytest.mark.processes
def test_empty_that_is_not_returned_is_used_again() -> None:
    """Three wasted buffers of 786 kB with each of 100 batches: 236 MB if they were lost."""
    loader = DataLoader(Made(image_and_label, 4 * 150), 4, num_workers=2, collate_fn=stack_and_waste)
    for position, batch in enumerate(loader):
        assert batch.amax() == 4 * position + 3
        del batch
        if position == 30:
            before = summed_pss()
        if position == 130:
            grown = summed_pss() - before
    assert grown < 80e6, f"100 batches left {grown / 1e6:.0f} MB"


def test_empty_outside_a_worker_is_torchs_empty() -> None:
    for shape in [(), (0,), (3, 4), (500, 500), torch.Size([2, 2])]:
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.bfloat16):
            tensor = fastq_loader.empty(shape, dtype)
            assert type(tensor) is torch.Tensor
            assert tensor.shape == torch.Size(shape)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            tensor.zero_()
            assert not tensor.any()


def empties_of_all_sorts(index: int) -> list[torch.Tensor]:
    shapes = [(), (0,), (3, 4), (16_384,), (70, 1000), (2, 3, 90, 90)]
    dtypes = (torch.float32, torch.bool, torch.complex128, torch.bfloat16, torch.int64)
    return [fastq_loader.empty(shape, dtype).fill_(index) for shape in shapes for dtype in dtypes]


@pytest.mark.processes
def test_empty_of_every_shape_and_dtype_travels() -> None:
    loader = DataLoader(Made(empties_of_all_sorts, 6), batch_size=None, num_workers=2, collate_fn=identity)
    for index, batch in enumerate(loader):
        assert_same(empties_of_all_sorts(index), batch)


# What a dataset or a collate keeps is its own


class Keeper:
    """A dataset that ships one tensor object, or one it has just written to, again and again."""

    def __init__(self, manner: str, size: int) -> None:
        self.manner = manner
        self.size = size
        self.buffer = torch.zeros(100, 400)
        self.array = np.zeros((100, 400), dtype=np.float32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.manner == "the same object":
            return self.buffer
        if self.manner == "overwritten before":
            return self.buffer.fill_(index)
        if self.manner == "a view of it":
            return self.buffer.fill_(index)[10:]
        if self.manner == "its transpose":
            return self.buffer.fill_(index).t()
        if self.manner == "an array":
            self.array.fill(index)
            return self.array
        if self.manner == "a tensor on the array":
            self.array.fill(index)
            return torch.from_numpy(self.array)
        return {"object": Opaque(self.buffer.fill_(index)), "again": self.buffer}


MANNERS = [
    "the same object",
    "overwritten before",
    "a view of it",
    "its transpose",
    "an array",
    "a tensor on the array",
    "inside an object",
]


def values_in(batch: Any) -> list[float]:
    """The distinct values of a batch of a Keeper."""
    if isinstance(batch, dict):
        return sorted({*values_in(batch["object"].value), *values_in(batch["again"])})
    return np.unique(np.asarray(batch)).tolist()


@pytest.mark.processes
@pytest.mark.parametrize("manner", MANNERS)
def test_user_dataset_keeps_reference(manner: str) -> None:
    """torch moves the dataset's own tensor to shared memory, where later writes reach delivered batches."""
    loader = DataLoader(Keeper(manner, 60), batch_size=None, num_workers=2, collate_fn=identity)
    kept = list(loader)
    for index, batch in enumerate(kept):
        assert values_in(batch) == [0 if manner == "the same object" else index]


@pytest.mark.processes
def test_user_dataset_does_not_see_what_the_consumer_writes() -> None:
    keeper = Keeper("the same object", 30)
    loader = DataLoader(keeper, batch_size=None, num_workers=1, collate_fn=identity, persistent_workers=True)
    with loader:
        for _ in range(2):
            for batch in loader:
                assert values_in(batch) == [0]
                batch.fill_(9)


def keep_a_buffer(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Collate into one buffer for all batches, and spoil the previous batch's extra tensor."""
    if not KEPT_BY_WORKER:
        KEPT_BY_WORKER.extend([torch.empty(len(batch), *IMAGE), torch.zeros(3)])
    buffer, small = KEPT_BY_WORKER
    torch.stack(batch, out=buffer)
    small += 1
    return {"images": buffer, "count": small}


@pytest.mark.processes
def test_user_collate_keeps_reference() -> None:
    """A collate that stacks into the same buffer each time must not change what was delivered."""
    loader = DataLoader(Made(image, 160), batch_size=4, num_workers=1, collate_fn=keep_a_buffer)
    kept = list(loader)
    for position, batch in enumerate(kept):
        assert torch.equal(batch["images"], stacked(position)), f"batch {position}"
        assert batch["count"].tolist() == [position + 1] * 3


class StreamOfOneBuffer(torch.utils.data.IterableDataset):
    """Yields one buffer, and spoils it after each yield."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.empty(IMAGE)
        for index in range(40):
            yield buffer.fill_(index)
            buffer.fill_(-1)


@pytest.mark.processes
def test_user_stream_reuses_its_buffer() -> None:
    loader = DataLoader(StreamOfOneBuffer(), batch_size=None, num_workers=1)
    assert [np.unique(batch).tolist() for batch in list(loader)] == [[index] for index in range(40)]
