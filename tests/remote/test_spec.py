"""What a host is told: it travels as bytes, and the user's objects are opened once."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import Any

import pytest

from fastq_loader.errors import UnpicklableError
from fastq_loader.remote.spec import HostSpec, SentPayload, versions
from tests.support.pair import TOKEN
from tests.support.worker_setup import make_plan


def sent(dataset: Any, **fields: Any) -> HostSpec:
    there: HostSpec = pickle.loads(pickle.dumps(HostSpec.of(make_plan(dataset, **fields), TOKEN)))
    return there


def test_it_arrives_with_what_was_defined_in_a_function() -> None:
    factor = 3
    spec = sent(lambda index: factor * index, dynamic=True)
    assert spec.plan.payload.open()["dataset"](2) == 6
    assert spec.plan.payload.open() is spec.plan.payload.open()
    assert spec.token == TOKEN
    assert spec.path == tuple(sys.path)
    assert not spec.plan.shared_tasks, "the stand-in claims"
    assert TOKEN.hex() not in repr(spec)
    with pytest.raises(NotImplementedError):
        spec.plan.backend(spec.plan)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(UnpicklableError, match="collate_fn cannot be sent to another machine: TypeError"):
        HostSpec.of(make_plan(range(3), threading.Lock().acquire), TOKEN)


def fail(pid: int) -> Any:
    raise OSError(f"opened in {os.getpid()}, made in {pid}")


class Sulking:
    def __reduce__(self) -> Any:
        return fail, (os.getpid(),)


def test_what_cannot_be_opened_says_so_to_each_worker() -> None:
    payload = pickle.loads(pickle.dumps(SentPayload(pickle.dumps(Sulking()))))
    for _ in range(2):
        with pytest.raises(OSError, match="made in"):
            payload.open()


def test_versions_are_named_and_are_texts() -> None:
    assert {"Python", "torch", "numpy"} < versions().keys()
    assert all(isinstance(text, str) for text in versions().values())
