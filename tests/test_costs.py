"""What a batch costs must not grow with the epoch, with the batches that are kept, or faster than its leaves.

Costs are counted in calls of Python and C functions, not in seconds: the same on every machine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from fastq_loader.allocator import Allocator, empty
from fastq_loader.arena import AVAILABLE
from fastq_loader.blocks import BlockLedger
from fastq_loader.events import Arrived, Drawn, EpochStarted, Send, Wanted
from fastq_loader.messages import BATCH, Answer
from fastq_loader.scheduler import Scheduler
from tests.pair import LARGE, Pair, paired

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # The invariants look at every block, which is what is not to be counted here.
    monkeypatch.setattr(BlockLedger, "check", lambda self: None)
    with paired() as both:
        yield both


def calls(action: Callable[[], object]) -> int:
    """How many functions `action` calls, directly and indirectly."""
    count = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what the collector calls is not the action's
    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def batch_of(leaves: int, elements: int) -> dict[str, torch.Tensor]:
    return {str(leaf): torch.ones(elements) for leaf in range(leaves)}


@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_batch_costs_the_same_however_many_are_kept(pair: Pair, elements: int) -> None:
    batch = batch_of(2, elements)
    kept = [pair.trip(batch) for _ in range(10)]
    few = calls(lambda: kept.append(pair.trip(batch)))
    kept += [pair.trip(batch) for _ in range(300)]
    many = calls(lambda: kept.append(pair.trip(batch)))
    assert many <= few


@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_batch_costs_what_its_leaves_cost(pair: Pair, elements: int) -> None:
    costs = []
    for leaves in (1, 11, 21, 201):
        for _ in range(3):  # the spec is known, and the blocks are there
            pair.trip(batch_of(leaves, elements))
        batch = batch_of(leaves, elements)
        costs.append(calls(lambda batch=batch: pair.trip(batch)))  # type: ignore[misc]
    ten = costs[1] - costs[0]
    assert costs[2] - costs[1] <= ten * 1.1
    assert costs[3] - costs[2] <= 18 * ten * 1.1


@pytest.mark.parametrize("dynamic", [False, True])
def test_scheduling_a_batch_costs_the_same_all_epoch_long(dynamic: bool) -> None:
    scheduler = Scheduler(workers=2, prefetch=2, in_order=True, ledger=BlockLedger(), dynamic=dynamic)
    sends: list[Any] = []
    for index, _ in enumerate(scheduler.handle(EpochStarted(1))):
        sends += scheduler.handle(Drawn(index))

    def step() -> None:
        send = sends.pop(0)
        assert isinstance(send, Send)
        answer = Answer(send.epoch, send.seq, 0, BATCH, 0, 0, (), (), (), None)
        scheduler.handle(Arrived(send.worker or 0, answer))
        assert len(scheduler.handle(Wanted())) == 2
        sends.extend(scheduler.handle(Drawn(send.seq)))

    costs = [calls(step) for _ in range(2000)]
    assert set(costs[10:]) == {costs[10]}


def test_a_users_tensor_is_copied_once_and_one_of_ours_not_at_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    write = Allocator.write

    def counted(self: Allocator, offset: int, source: int, nbytes: int) -> None:
        copied.append(nbytes)
        write(self, offset, source, nbytes)

    monkeypatch.setattr(Allocator, "write", counted)
    handle = pair.arrive(pair.pack(lambda: torch.ones(LARGE)))
    assert torch.equal(pair.deliver(handle), torch.ones(LARGE))
    assert copied == [LARGE * 4]
    handle = pair.arrive(pair.pack(lambda: empty((LARGE,)).fill_(1)))
    assert torch.equal(pair.deliver(handle), torch.ones(LARGE))
    assert copied == [LARGE * 4], "what was allocated in a block was copied"
