"""The attributes of a loader, its copies, what it says of itself, and the texts of its refusals."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import SequentialSampler

from fastq_loader import DataLoader, Dynamic, Processes, RoundRobin, StatefulDataLoader, ToDevice
from tests.conftest import descendants, wait_until
from tests.support.crimes import Rows
from tests.support.datasets import SizedStream, Stream, identity
from tests.support.loaders import EIGHT, numbers

MAP = Rows(4)
SAMPLER = SequentialSampler(MAP)
STREAM = Stream("tensors", [4])

# I9: torch's own arguments


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "negative workers": {"num_workers": -1},
    "negative timeout": {"timeout": -1},
    "prefetch without workers": {"prefetch_factor": 2},
    "persistent without workers": {"persistent_workers": True},
    "context without workers": {"multiprocessing_context": "fork"},
    "unknown start method": {"num_workers": 1, "multiprocessing_context": "teleport"},
    "context of the wrong type": {"num_workers": 1, "multiprocessing_context": 3},
    "sampler and shuffle": {"sampler": SAMPLER, "shuffle": True},
    "batch sampler and batch size": {"batch_sampler": [[0]], "batch_size": 2},
    "batch sampler and drop_last": {"batch_sampler": [[0]], "drop_last": True},
    "drop_last without batches": {"batch_size": None, "drop_last": True},
    "batch size 0": {"batch_size": 0},
    "shuffled stream": {"dataset": STREAM, "shuffle": True},
    "stream with a sampler": {"dataset": STREAM, "sampler": SAMPLER},
    # Two mistakes at once: the first check decides.
    "workers before timeout": {"num_workers": -1, "timeout": -1},
    "prefetch before persistent": {"prefetch_factor": 2, "persistent_workers": True},
    "context before samplers": {"multiprocessing_context": "fork", "sampler": SAMPLER, "shuffle": True},
    "shuffle before batch sampler": {"sampler": SAMPLER, "shuffle": True, "batch_sampler": [[0]]},
}


def refusal(loader: Callable[..., Any], arguments: dict[str, Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        loader(**{"dataset": MAP, **arguments})
    return caught.type, str(caught.value)


@pytest.mark.parametrize("mistake", BAD_ARGUMENTS)
def test_i9_bad_arguments_are_refused_in_torchs_words(mistake: str) -> None:
    arguments = BAD_ARGUMENTS[mistake]
    assert refusal(DataLoader, arguments) == refusal(TorchDataLoader, arguments)


def test_i9b_len_follows_a_dataset_that_grows() -> None:
    dataset = [0, 1, 2, 3, 4]
    loader = DataLoader(dataset, batch_size=2)
    assert len(loader) == 3
    dataset += [5, 6]
    assert len(loader) == 4
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "length"), [(4, False, 3), (4, True, 2), (11, True, 1), (None, False, 11)]
)
def test_r9_the_length_of_a_stream_follows_torchs_formula(
    batch_size: int | None, drop_last: bool, length: int
) -> None:
    stream = SizedStream("tensors", [1], told=11)
    for kind in (TorchDataLoader, DataLoader):
        assert len(kind(stream, batch_size=batch_size, drop_last=drop_last)) == length
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(DataLoader(STREAM))


# Attributes, from which frameworks rebuild loaders


GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "torch's": {
        "batch_size": 3,
        "sampler": SAMPLER,
        "num_workers": 2,
        "collate_fn": identity,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 2.5,
        "worker_init_fn": print,
        "multiprocessing_context": torch.multiprocessing.get_context("fork"),
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory_device": "cuda",
        "in_order": False,
    },
    "batch sampler": {"batch_sampler": [[0, 1]]},
    "names": {"schedule": "dynamic", "workers": "processes", "device": "cpu"},
    "round robin": {"schedule": RoundRobin(7), "workers": Processes(), "device": torch.device("cpu")},
    "configurations": {
        "schedule": Dynamic(window=5),
        "workers": Processes(max_restarts=3),
        "device": ToDevice("cpu", prefetch=3, transform=identity),
    },
}


PARAMETERS = [*inspect.signature(DataLoader.__init__).parameters][1:]


@pytest.mark.parametrize("name", GIVEN)
def test_every_parameter_is_an_attribute_from_which_the_same_loader_can_be_made(name: str) -> None:
    loader = DataLoader(MAP, **GIVEN[name])
    assert [parameter for parameter in PARAMETERS if not hasattr(loader, parameter)] == ["shuffle"]
    for parameter, value in GIVEN[name].items():
        assert getattr(loader, parameter) is value, parameter
    made = ("batch_sampler",) if name != "batch sampler" else ("batch_size", "drop_last", "sampler")
    arguments = {each: getattr(loader, each) for each in PARAMETERS if each not in ("shuffle", *made)}
    twin = DataLoader(**arguments)
    assert {each: getattr(twin, each) for each in arguments} == arguments
    if name == "configurations":
        twin = pickle.loads(pickle.dumps(loader))
        assert [twin.schedule, twin.workers, twin.device] == [*GIVEN[name].values()]


def test_instances_that_the_constructor_did_not_make_have_the_defaults() -> None:
    bare = object.__new__(DataLoader)
    assert (bare.schedule, bare.workers, bare.device) == ("round_robin", "processes", None)
    assert "not initialised (AttributeError" in repr(bare)
    assert bare.statistics().batches == 0
    bare.close()


# I10, and what a loader says of itself


def eight(workers: int = 2) -> DataLoader[int]:
    return DataLoader(range(8), batch_size=2, num_workers=workers, persistent_workers=workers > 0)


@pytest.mark.processes
def test_no_private_name_of_ours_can_be_a_subclasss() -> None:
    """On the class that users extend, and in its instances."""
    torchs, loader = {*dir(TorchDataLoader), *vars(TorchDataLoader(MAP))}, StatefulDataLoader(MAP)
    list(loader)
    ours = {name for name in {*dir(StatefulDataLoader), *vars(loader)} - torchs if name.startswith("_")}
    own = {name for name in ours if not name.startswith(("__", "_fastq_loader_", "_abc_"))}
    assert own <= {"_iterator"}, "torch's persistent loaders have that"


def test_i10_setting_the_iterator_to_none_ends_persistent_workers() -> None:
    loader, before = eight(), descendants().keys()
    assert loader._iterator is None
    for _ in range(2):
        assert numbers(loader) == EIGHT
        assert loader._iterator is not None
        assert len(descendants().keys() - before) == 2
        loader._iterator = None
        assert wait_until(lambda: descendants().keys() <= before, 30)
        assert loader._iterator is None


@pytest.mark.processes
def test_repr_says_what_the_loader_is_doing() -> None:
    with eight() as loader:
        assert repr(loader) == (
            "<fastq_loader.loader.DataLoader dataset=range batch_size=2 num_workers=2 "
            "persistent_workers=True: no workers running, 0 epochs begun, 0 batches delivered>"
        )
        next(iter(loader))
        assert repr(loader).endswith(": 2 workers running, 1 epochs begun, 1 batches delivered>")
    assert ": no workers running, 1 epochs begun" in repr(loader)
    assert "loads on the calling thread, 0 epochs" in repr(eight(0))


@pytest.mark.processes
def test_statistics_count_what_the_loader_did() -> None:
    with DataLoader(Rows(8, 50_000), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        at_first = loader.statistics()
        kept = [list(loader) for _ in range(2)]
        after = loader.statistics()
        assert {worker.pid for worker in after.workers} <= set(descendants())
    assert (at_first.epochs, at_first.batches, at_first.bytes) == (0, 0, 0)
    assert (after.epochs, after.batches) == (2, 8)
    assert after.bytes == 8 * 2 * 50_000 * 4
    assert [worker.id for worker in after.workers] == [0, 1]
    assert [worker.batches for worker in after.workers] == [4, 4]
    assert all(worker.work_seconds > 0 and worker.idle_seconds >= 0 for worker in after.workers)
    assert after.blocks_in_use >= len(kept) * 4
    assert after.blocks_grown >= after.blocks_in_use
    assert after.arena_bytes >= after.bytes
    assert (after.window, after.stale_answers, after.rejected_frames, after.staging) == (4, 0, 0, None)
