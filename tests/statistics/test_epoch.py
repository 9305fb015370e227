"""Where the time of an epoch goes: all of it is counted once, on what it was spent, by whoever asks first."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.statistics.epoch import EpochCounters, summed
from fastq_loader.statistics.notes import NoteList, Notes
from fastq_loader.statistics.snapshots import CAUSES
from fastq_loader.statistics.workers import WorkerCounters
from tests.support.alarms import Alarm

TIMES = st.integers(0, 10**10)


def answer(
    seq: int = 0, started: int = 0, collated: int = 0, finished: int = 0, new_memory: int = 0
) -> Answer:
    return Answer(1, seq, 0, BATCH, started, finished, (), (), None, collated=collated, new_memory=new_memory)


def by_cause(epoch: EpochCounters) -> dict[str, int]:
    return {cause: nanoseconds for cause, nanoseconds in epoch.by_cause.items() if nanoseconds}


def waiting(previous: int, *waits: tuple[int, int], cause: str = "workers", **times: int) -> dict[str, int]:
    """What a call from 100 to 1000 is spent on, in which these waits end with an answer of these times."""
    epoch = EpochCounters(1, 100)
    epoch.started(100)
    if previous:
        epoch.answered(0, answer(8, previous - 10, previous, previous), True, WorkerCounters(0, 1))
    epoch.entered(100)
    for wait in waits:
        epoch.waited(cause, *wait)
    came = answer(9, **times)
    epoch.answered(0, came, True, WorkerCounters(0, 1))
    epoch.left(1000, came)
    return by_cause(epoch)


CALLS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "the worker was loading": (
        waiting(50, (100, 900), started=50, collated=900, finished=900),
        {"workers": 800, "transport": 100},
    ),
    "it was loading, and packed": (
        waiting(50, (100, 900), started=50, collated=700, finished=850),
        {"workers": 600, "transport": 300},
    ),
    "it was busy with the batch before, as long as with this one": (
        waiting(500, (100, 900), started=500, collated=900, finished=900),
        {"workers": 800, "transport": 100},
    ),
    "the batch before is like this one, half of which is packing": (
        waiting(300, (100, 500), started=300, collated=400, finished=500),
        {"workers": 200, "transport": 700},
    ),
    "it had nothing to do, and its task was on the way": (
        waiting(100, (100, 900), started=600, collated=900, finished=900),
        {"workers": 300, "transport": 600},
    ),
    "it was its first batch: it was not up before": (
        waiting(0, (100, 900), started=600, collated=900, finished=900),
        {"start_up": 500, "workers": 300, "transport": 100},
    ),
    "others were quicker, but it was not up before": (
        waiting(0, (100, 900), cause="head_of_line", started=600, collated=900, finished=900),
        {"start_up": 500, "head_of_line": 300, "transport": 100},
    ),
    "others had nothing to do, and it was up": (
        waiting(50, (100, 900), cause="memory", started=600, collated=900, finished=900),
        {"memory": 800, "transport": 100},
    ),
    "a quarter of the batch's time went for new pages": (
        waiting(50, (100, 900), started=100, collated=900, finished=900, new_memory=200),
        {"workers": 600, "memory": 200, "transport": 100},
    ),
    "two waits": (
        waiting(50, (100, 400), (500, 900), started=50, collated=900, finished=900),
        {"workers": 700, "transport": 200},
    ),
    "nothing was waited for": (
        waiting(50, started=50, collated=90, finished=90),
        {"transport": 900},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wait_is_lost_to_what_the_worker_did(case: str) -> None:
    found, expected = CALLS[case]
    assert found == expected


def test_what_a_call_did_itself_is_counted_as_it_is_told() -> None:
    epoch = EpochCounters(1, 0)
    epoch.drew(10, 30)
    epoch.started(100)
    epoch.entered(150)
    epoch.waited("head_of_line", 150, 250)
    epoch.waited("memory", 250, 270)
    epoch.used_device(270, 300)
    epoch.left(310)
    assert by_cause(epoch) == {
        "sampler": 20,
        "start_up": 80,
        "consumer": 50,
        "head_of_line": 100,
        "memory": 20,
        "device_copy": 30,
        "transport": 10,
    }
    epoch.entered(400)
    epoch.waited("workers", 400, 450)  # for a batch that was an error without an answer
    epoch.left(460)
    assert by_cause(epoch)["workers"] == 50
    epoch.entered(500)
    epoch.ended(520, 0)
    assert (by_cause(epoch)["start_up"], epoch.over, epoch.batches, epoch.nanoseconds) == (100, True, 2, 520)


def test_a_batch_that_is_loaded_by_the_call_is_the_workers_time() -> None:
    epoch = EpochCounters(1, 0)
    epoch.started(0)
    epoch.entered(0)
    epoch.drew(0, 5)
    epoch.loaded(0, 5, 60, 85)
    epoch.left(90)
    assert by_cause(epoch) == {"sampler": 5, "workers": 80, "transport": 5}
    assert [tuple(cost) for cost in epoch.costs] == [(0, 80, 0)]


@given(st.data())
def test_the_causes_add_up_to_the_time_whatever_happens(data: Any) -> None:
    epoch = EpochCounters(1, began := data.draw(TIMES))
    now, answers = began, 0

    def later() -> int:
        nonlocal now
        now += data.draw(st.integers(0, 10**9))
        return now

    epoch.started(later())
    for seq in range(data.draw(st.integers(0, 6))):
        epoch.entered(later())
        if data.draw(st.booleans()):
            epoch.sent(seq, later())
        for _ in range(data.draw(st.integers(0, 3))):
            what = data.draw(st.sampled_from(["workers", "head_of_line", "memory", "draw", "device"]))
            since, until = later(), later()
            if what == "draw":
                epoch.drew(since, until)
            elif what == "device":
                epoch.used_device(since, until)
            else:
                epoch.waited(what, since, until)
        times = sorted(data.draw(st.lists(st.integers(0, now), min_size=3, max_size=3)))
        new_memory = data.draw(st.integers(0, times[2] - times[0]))
        came = answer(seq, *times, new_memory=new_memory)
        ending = data.draw(st.sampled_from(["answer", "error", "interrupt"]))
        if ending == "answer":
            answers += 1
            epoch.answered(data.draw(st.integers(0, 1)), came, True, WorkerCounters(0, 1))
            epoch.left(later(), came)
        elif ending == "error":
            epoch.left(later())
    epoch.entered(later())
    epoch.ended(later(), 0)
    if data.draw(st.booleans()):
        epoch.closed(later())
    assert epoch.nanoseconds == now - began == sum(epoch.by_cause.values())
    assert all(nanoseconds >= 0 for nanoseconds in epoch.by_cause.values())
    found = epoch.snapshot()
    assert abs(sum(map(found.spent_on, CAUSES)) - found.seconds) < 1e-6
    assert len(epoch.costs) == answers


def test_a_call_that_was_cut_short_counts_as_far_as_it_is_known() -> None:
    epoch = EpochCounters(1, 0)
    epoch.started(10)
    epoch.entered(20)
    epoch.drew(20, 50)
    found = epoch.snapshot()
    assert sum(map(found.spent_on, CAUSES)) == pytest.approx(found.seconds) == pytest.approx(50e-9)
    epoch.entered(70)
    assert epoch.nanoseconds == 70


def test_a_snapshot_may_be_taken_while_another_thread_counts() -> None:
    class Counted(EpochCounters):
        @property
        def nanoseconds(self) -> int:  # asked for in the middle of a snapshot
            self._note_ready(0, 10**9)
            return super().nanoseconds

    epoch = Counted(1, 0)
    epoch._note_ready(0, 1)
    assert len(epoch.snapshot().ready) == 1
    assert len(epoch.snapshot().ready) == 60


def test_an_answer_may_have_finished_after_it_was_handed_out_by_another_clock() -> None:
    epoch = EpochCounters(1, 0)
    epoch.started(10)
    epoch.entered(20)
    epoch.left(10**8, answer(started=10**9, collated=10**9, finished=10**9))
    assert epoch.snapshot().ready == (0.0,) * 6


def test_what_ending_the_workers_takes_is_their_start_and_end() -> None:
    epoch = EpochCounters(1, 0)
    epoch.started(10)
    epoch.entered(20)
    epoch.ended(25, 0)
    epoch.closed(95)
    assert by_cause(epoch) == {"consumer": 10, "start_up": 10 + 5 + 70}
    assert epoch.nanoseconds == 95


def test_what_a_batch_took_to_load_is_known_of_all_though_the_last_thousand_are_kept() -> None:
    epoch = EpochCounters(1, 0)
    for seq in range(2048):
        epoch.loaded(seq, 0, 0, 3 if seq < 1024 else 1)
    assert len(epoch.costs) == 1024
    assert {cost.load for cost in epoch.costs} == {1}
    assert epoch.load == 2


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30))
def test_ready_batches_are_averaged_over_parts_of_the_epoch(batches: list[tuple[int, int]]) -> None:
    epoch = EpochCounters(1, 0)
    epoch.started(0)
    now = ready = 0
    for seq, (finished, pause) in enumerate(batches):
        now += pause
        epoch.entered(now)
        came = answer(seq, finished=min(finished, now))
        epoch.left(now, came)
        ready += now - came.finished
    found = epoch.snapshot()
    assert 1 <= len(found.ready) <= 64
    parts = len(found.ready)
    width = 1 << 24
    while now >= 64 * width:
        width *= 2
    widths = [width] * (parts - 1) + [max(1, now - width * (parts - 1))]
    total = sum(each * size for each, size in zip(found.ready, widths, strict=True))
    assert abs(total - ready) <= 0.006 * sum(widths) + 1


def test_what_was_counted_in_several_epochs_is_one_sum() -> None:
    epochs = []
    for number in (1, 2):
        epoch = EpochCounters(number, 0, cpu=10)
        epoch.started(100)
        epoch.entered(150)
        epoch.left(170)
        epoch.used_cpu(30)
        epoch.entered(180)
        epoch.ended(200, 40)
        epoch.used_cpu(70)  # after its end
        epochs.append(epoch)
    total = summed(epochs)
    assert (total.epoch, total.batches, total.ready) == (None, 2, ())
    assert round(total.seconds * 1e9) == 400
    assert round(total.consumer_seconds * 1e9) == 120
    assert round(total.cpu_seconds * 1e9) == 60
    assert abs(total.wait_p50 / 20e-9 - 1) < 0.03


def waited(worker: WorkerCounters) -> tuple[int, int]:
    """Nanoseconds that a worker waited for tasks that were sent, and that were not."""
    found = worker.snapshot()
    return round(found.idle_seconds * 1e9), round(found.blocked_seconds * 1e9)


def test_a_task_that_was_sent_again_counts_from_then_on() -> None:
    epoch = EpochCounters(1, 0)
    epoch.sent(0, 10)
    epoch.sent(0, 20)
    worker = WorkerCounters(1, 4711)
    epoch.answered(1, answer(0, 30, 40, 40), True, worker)
    epoch.sent(1, 50)
    epoch.sent(1, 55)
    epoch.answered(1, answer(1, 60, 70, 70), True, worker)
    assert waited(worker) == (5, 15)
    epoch.answered(1, answer(2, 90, 95, 95), False, worker)
    assert waited(worker) == (5, 35), "one that nobody knows to be sent was sent when it began"


Step = tuple[str, tuple[Any, ...]]


def batches(count: int) -> list[Step]:
    worker, found = WorkerCounters(0, 4711), []
    for seq in range(count):
        at = 100 * seq
        answer = Answer(1, seq, 0, BATCH, at, at + 60, (), (), None, fetched=at + 30, collated=at + 40)
        waits = ("waited", ("workers", at + 10, at + 70)), ("used_device", (at + 70, at + 75))
        found += [
            ("entered", (at,)),
            ("drew", (at, at + 5)),
            ("sent", (seq, at + 5)),
            ("answered", (0, answer, True, worker)),
            *(waits if seq % 3 else ()),
            ("left", (at + 80, answer, seq, None)),
        ]
    return found


def put_down(notes: Notes, step: Step) -> None:
    name, arguments = step
    if name == "drew":
        notes.drew = (*arguments, [])  # type: ignore[assignment]
    elif name == "sent":
        assert notes.drew is not None
        notes.drew = (*notes.drew[:2], [arguments[0]])
    elif name == "answered":
        notes.answers.append(arguments)  # type: ignore[arg-type]
    elif name in ("waited", "used_device"):
        notes.others.append((getattr(notes, name), *arguments))
    else:
        getattr(notes, name)(*arguments)


@given(st.integers(0, 5), st.data())
def test_it_makes_no_difference_when_notes_are_counted(count: int, data: Any) -> None:
    at_once, counters = EpochCounters(1, 0), EpochCounters(1, 0)
    for name, arguments in batches(count):
        getattr(at_once, name)(*arguments)
    later = Notes(counters)
    for step in batches(count):
        put_down(later, step)
        if data.draw(st.booleans()):
            later.counted()
    later.flush()
    assert later.counted().snapshot() == at_once.snapshot()
    assert later.counted().costs == at_once.costs
    assert later.counted().batches == count


def test_an_error_is_not_kept() -> None:
    counters = EpochCounters(1, 0)
    notes = Notes(counters, among := NoteList())
    notes.left(5, None, None, None)
    assert notes.left(6, None, 3, KeyError())
    notes.counted()
    assert (counters.batches, among.notes) == (2, [])


def test_an_interrupt_loses_no_note() -> None:
    counters = EpochCounters(1, 0)
    notes, drew = Notes(counters), []

    def interrupted(number: int) -> None:
        drew.append(number)
        if number == 1:
            raise Alarm

    for number in range(4):
        notes.others.append((interrupted, number))
        notes.flush()
    with pytest.raises(Alarm):
        notes.counted()
    notes.counted()
    assert drew == [0, 1, 2, 3]


def test_only_one_counts_at_a_time() -> None:
    counters = EpochCounters(1, 0)
    notes, order = Notes(counters), []

    def asked() -> None:
        order.append("first")
        notes.counted()  # in the handler of a signal
        thread = threading.Thread(target=notes.counted)
        thread.start()
        thread.join()
        notes.others.append((counters.used_cpu, 7))
        notes.flush()

    for other in ((asked,), (order.append, "second")):
        notes.others.append(other)
        notes.flush()
    notes.counted()
    assert order == ["first", "second"]
    assert counters.cpu == 0, "it came after"
    assert notes.counted().cpu == 7


def test_epochs_of_one_loader_are_counted_in_the_order_of_what_happened() -> None:
    watching, among = Mock(), NoteList()
    first, second = (Notes(EpochCounters(number, 0), among) for number in (1, 2))
    for notes in (first, second):
        notes.observe(watching)
    for now, notes in enumerate((first, second, first, second)):
        notes.entered(now + 1)
        notes.flush()
    first.counted()
    assert [told.args[:2] for told in watching.entered.call_args_list] == [(1, 1), (2, 2), (1, 3), (2, 4)]
