"""What a worker is told, for tests that are its consumer themselves."""

from __future__ import annotations

import os
from typing import Any

from fastq_loader.extras.remote.far_worker import FarSetup
from fastq_loader.memory.arena import Arena
from fastq_loader.scheduling.schedules import RoundRobin, Window
from fastq_loader.workers.config import Options, Plan, Rules, Setup
from fastq_loader.workers.kinds import Processes
from fastq_loader.workers.payload import Descriptors, Payload
from tests.support.pair import TOKEN


def make_plan(dataset: Any, collate_fn: Any = None, init_fn: Any = None, **fields: Any) -> Plan:
    """A plan as torch's defaults give it, but for some fields."""
    given: dict[str, Any] = {
        "payload": Payload(dataset, collate_fn or as_it_is, init_fn),
        "rules": Rules(iterable=False, auto_collation=False, drop_last=False),
        "workers": 1,
        "prefetch": 2,
        "in_order": True,
        "options": Options(RoundRobin(), None, None, Processes()),
        "shared_tasks": False,
        "window": Window(2),
        "timeout": 0,
        "persistent": True,
        "context": None,
        **fields,
    }
    return Plan(**given)


def make_setup(arena: Arena, dataset: Any, *, worker: int = 0, base_seed: int = 1, **fields: Any) -> Setup:
    """The same for one of its workers."""
    return Setup(
        plan=make_plan(dataset, **fields),
        worker=worker,
        space=None,
        consumer=os.getpid(),
        base_seed=base_seed,
        shared_seed=None,
        token=TOKEN,
        mapping=arena.mapping,
        descriptors=Descriptors(stacks=2),
    )


def far_setup(dataset: Any, **fields: Any) -> FarSetup:
    """What a far worker of this is sent."""
    arena = Arena(1)
    setup = make_setup(arena, dataset, **fields)
    arena.retire([])
    return FarSetup.of(setup)


def as_it_is(data: Any) -> Any:
    return data
