"""What occurrences become: whatever happens, viewers can show all of it, and it adds up."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.messages import BATCH, BROKEN, ENDED, ERROR, PASSED, SKIPPED, Answer
from fastq_loader.tracing.events import Events
from tests.support.traces import Event, batches, check, interval, of, tracks

PID = 50


def answer(seq: int, started: int, fetched: int, collated: int, finished: int, **others: Any) -> Answer:
    head = Answer(1, seq, 0, BATCH, started, finished, (), (), None)
    return head._replace(**{"fetched": fetched, "collated": collated} | others)


def parsed(events: Events) -> list[Event]:
    return [event for line in events.lines for event in json.loads(f"[{line}]")]


def events(origin: int = 0) -> Events:
    return Events(origin, PID, lambda: PID)


def spans(found: list[Event], track: str) -> list[tuple[str, int, int]]:
    return [(span["name"], *interval(span)) for span in tracks(found)[track]]


def parts(found: list[Event], batch: int, epoch: int = 1) -> list[tuple[str, int, int]]:
    return [(span["name"], *interval(span)) for span in batches(found)[epoch, batch]]


# ---- one batch ----------------------------------------------------------------------------------------


def one_batch(trace: Events, **others: Any) -> list[Event]:
    trace.began(1, 10)
    trace.drew(1, 20, 30)
    trace.sent(1, 0, 35)
    trace.left(1, None, 40)
    trace.entered(1, 60)
    trace.waited(1, "workers", 65, 190)
    trace.answered(1, 1, 101, answer(0, 70, 110, 150, 180)._replace(**others))
    trace.used_device(1, 192, 195)
    trace.left(1, 0, 200)
    trace.entered(1, 300)
    trace.left(1, None, 310)
    trace.ended(1, 310)
    trace.closed(310, 350)
    found = parsed(trace)
    check(found)
    return found


def test_each_track_shows_its_part_of_a_batch() -> None:
    found = one_batch(events())
    assert spans(found, "consumer") == [
        ("iter", 10, 40),
        ("sampler", 20, 30),
        ("next", 60, 200),
        ("wait for workers", 65, 190),
        ("device", 192, 195),
        ("step", 200, 300),
        ("next", 300, 310),
        ("end of the workers", 310, 350),
    ]
    loading = [("fetch", 70, 110), ("collate", 110, 150), ("pack", 150, 180)]
    assert spans(found, "worker 1 (pid 101)") == loading
    assert parts(found, 0) == [("queued", 35, 70), ("load", 70, 180), ("ready", 180, 200)]
    assert [event["name"] for event in of(found, "i")] == ["epoch 1 begins", "epoch 1 ends"]
    ready = [(event["ts"], event["args"]["batches"]) for event in of(found, "C")]
    assert ready == [(0.180, 1), (0.200, 0)]


def test_workers_on_other_machines_have_tracks_of_their_own_whatever_their_process_ids() -> None:
    places = {101: (812, "10.0.0.2"), 102: (812, '"b"'), 103: None, 812: None, 104: (0, ""), 105: (0, "")}
    trace = Events(0, PID, lambda: PID, places.__getitem__)
    for seq, pid in enumerate((101, 102, 103, 812, 101)):
        if seq == 4:
            places[101] = 900, "10.0.0.3"  # its machine was lost between two batches
        trace.answered(
            1, min(pid % 100, 3), pid, answer(seq, 10 + 9 * seq, 11 + 9 * seq, 12 + 9 * seq, 13 + 9 * seq)
        )
    for worker in (4, 5):
        trace.replaced(1, worker, 100 + worker, "it died", 90)  # and the next one is not up yet
    found = parsed(trace)
    check(found)
    loading = {track: len(spans) for track, spans in tracks(found).items() if track.startswith("worker")}
    assert loading == {
        "worker 1 (pid 812 on 10.0.0.2)": 3,
        'worker 2 (pid 812 on "b")': 3,
        "worker 3 (pid 103)": 3,
        "worker 3 (pid 812)": 3,
        "worker 1 (pid 900 on 10.0.0.3)": 3,
    }
    names = of(found, "M", "thread_name")
    assert len({event["tid"] for event in names}) == len(names)
    named = {event["tid"]: event["args"]["name"] for event in names}
    assert [named[mark["tid"]] for mark in of(found, "i")] == [
        "worker 4 (not up yet)",
        "worker 5 (not up yet)",
    ]


def test_times_count_from_the_origin_and_what_began_before_it_is_left_out() -> None:
    trace = events(origin=100)
    trace.waited(1, "workers", 99, 110)
    trace.drew(1, 120, 130)
    trace.answered(1, 0, 100, answer(0, 90, 95, 110, 120))
    trace.left(1, 0, 140)
    check(parsed(trace))
    assert {track: spans(parsed(trace), track) for track in tracks(parsed(trace))} == {
        "consumer": [("sampler", 20, 30)],
        "worker 0 (pid 100)": [("pack", 10, 20)],
    }


@pytest.mark.parametrize(
    ("others", "phases"),
    [
        ({"outcome": ERROR, "fetched": 0, "collated": 160}, (70, 160, 180)),  # of an earlier batch
        ({"outcome": ERROR, "fetched": 20, "collated": 30}, (70, 70, 180)),
        ({"outcome": BROKEN, "fetched": 0, "collated": 0}, (180, 180, 180)),
        ({"fetched": 500, "collated": 400}, (180, 180, 180)),
    ],
)
def test_times_that_are_missing_or_of_an_earlier_batch_leave_no_gap(
    others: dict[str, Any], phases: tuple[int, int, int]
) -> None:
    found = one_batch(events(), **others)
    fetched, collated, finished = phases
    loading = [("fetch", 70, fetched), ("collate", fetched, collated), ("pack", collated, finished)]
    assert sorted(spans(found, "worker 1 (pid 101)")) == sorted(loading)
    assert parts(found, 0) == [("queued", 35, 70), ("load", 70, 180), ("ready", 180, 200)]


@pytest.mark.parametrize("outcome", [ENDED, SKIPPED, PASSED])
def test_an_answer_without_a_batch_is_one_span(outcome: int) -> None:
    trace = events()
    trace.sent(1, 0, 10)
    trace.answered(1, 0, 100, answer(0, 20, 20, 30, 40, outcome=outcome))
    assert len(spans(parsed(trace), "worker 0 (pid 100)")) == 1
    trace.left(1, 0, 50)
    assert not batches(parsed(trace))


def test_a_batch_that_was_lost_with_its_worker_shows_it() -> None:
    trace = events()
    trace.sent(1, 0, 10)
    trace.replaced(1, 0, 102, "killed by SIGKILL: \ud800", 50)
    trace.sent(1, 0, 60)
    trace.entered(1, 70)
    trace.answered(1, 0, 102, answer(0, 80, 85, 90, 95, attempt=1))
    trace.left(1, 0, 100)
    found = parsed(trace)
    check(found)
    assert parts(found, 0)[:2] == [("lost with a worker", 10, 60), ("queued", 60, 80)]
    (mark,) = of(found, "i")
    assert mark["name"] == "worker 0 was replaced"
    assert mark["args"] == {"about": "killed by SIGKILL: \ud800"}


def test_stalls_and_errors_are_marks_in_the_call() -> None:
    trace = events()
    trace.entered(1, 100)
    trace.raised(1, 7, ValueError('a "quoted"\n text'), 3_000_000_100)
    trace.left(1, 7, 3_000_000_100)
    trace.entered(1, 3_000_000_200)
    trace.left(1, 8, 4_000_000_199)
    marks = of(parsed(trace), "i")
    assert [mark["name"] for mark in marks] == ["ValueError at batch 7", "stall of 3.0 s"]
    assert marks[0]["args"]["about"] == "ValueError('a \"quoted\"\\n text')"


def test_a_task_that_was_only_sent_again_was_not_lost() -> None:
    trace = events()
    for again, attempt in ((40, 0), (60, 1)):  # others died: all that is to be claimed is sent again
        trace.sent(1, attempt, 10)
        trace.sent(1, attempt, again)
        trace.entered(1, 45)
        trace.answered(1, attempt, 100 + attempt, answer(attempt, 50, 52, 54, 56, attempt=attempt))
        trace.left(1, attempt, 70)
    check(parsed(trace))
    rows = batches(parsed(trace))
    assert [next(span["name"] for span in spans) for spans in rows.values()] == ["queued"] * 2


def test_a_task_that_could_not_be_sent_was_not_under_way() -> None:
    trace = events()
    trace.sent(1, 0, 10)
    trace.entered(1, 20)
    trace.raised(1, 0, TypeError("it cannot be pickled"), 30)
    trace.left(1, 0, 30)
    check(parsed(trace))
    assert not batches(parsed(trace))


def test_times_of_a_worker_that_do_not_fit_to_ours_leave_no_gap() -> None:
    found = one_batch(events(), started=30, finished=220)
    assert next(interval(span) for span in batches(found)[1, 0])[0] == 35


def test_a_worker_does_not_wait_from_one_epoch_to_the_next() -> None:
    trace = events()
    for epoch in (1, 2):
        for seq in range(2):
            start = 100 * epoch + 10 * seq
            trace.answered(epoch, 0, 100, answer(seq, start, start + 1, start + 2, start + 3))
    waits = [span for span in spans(parsed(trace), "worker 0 (pid 100)") if span[0] == "wait"]
    assert waits == [("wait", 103, 110), ("wait", 203, 210)]


def test_the_step_of_the_last_batch_ends_with_the_next_epoch() -> None:
    trace = events()
    trace.entered(1, 10)
    trace.left(1, 0, 20)
    trace.began(2, 30)
    trace.left(2, None, 40)
    trace.entered(2, 50)
    check(parsed(trace))
    assert spans(parsed(trace), "consumer") == [("next", 10, 20), ("step", 20, 30), ("iter", 30, 40)]


def test_nothing_is_ready_after_an_epoch_that_was_dropped() -> None:
    trace = events()
    trace.sent(1, 0, 10)
    trace.answered(1, 0, 100, answer(0, 20, 22, 24, 30))
    trace.dropped(1, 50)
    ready = [(event["ts"], event["args"]["batches"]) for event in of(parsed(trace), "C")]
    assert ready == [(0.030, 1), (0.050, 0)]


def test_what_was_ready_is_told_when_it_is_known() -> None:
    trace = events()
    for seq in range(3):
        trace.sent(1, seq, 10 + seq)
    trace.entered(1, 20)
    trace.answered(1, 0, 100, answer(0, 20, 22, 24, 30))
    trace.left(1, 0, 40)
    assert of(parsed(trace), "C") == [], "batch 1 may have been ready at any time since 11"
    trace.entered(1, 50)
    trace.answered(1, 1, 101, answer(1, 20, 22, 24, 25))
    trace.left(1, 1, 60)
    trace.entered(1, 70)
    trace.answered(1, 0, 100, answer(2, 30, 32, 34, 35))
    trace.left(1, 2, 80)
    ready = [(event["ts"], event["args"]["batches"]) for event in of(parsed(trace), "C")]
    assert ready == [(0.025, 1), (0.030, 2), (0.035, 3), (0.040, 2), (0.060, 1), (0.080, 0)]


def test_without_workers_the_consumer_loads() -> None:
    trace = events()
    trace.began(1, 1)
    trace.left(1, None, 5)
    trace.entered(1, 10)
    trace.drew(1, 11, 12)
    trace.loaded(1, 0, 13, 20, 25)
    trace.left(1, 0, 30)
    trace.entered(1, 40)
    trace.loaded(1, 1, 41, 20, 42)  # it failed before it was fetched: 20 is of the batch before
    check(parsed(trace))
    assert ("collate", 41, 42) in spans(parsed(trace), "consumer")
    names = [name for name, _, _ in spans(parsed(trace), "consumer")]
    assert names[:6] == ["iter", "next", "sampler", "fetch", "collate", "step"]


def test_copies_lie_on_a_track_of_their_own() -> None:
    trace = events(origin=5)
    trace.copied(64, 4, 30)
    trace.copied(64, 10, 30)
    trace.copied(64, 20, 30)
    check(parsed(trace))
    assert [(event["ph"], event["ts"]) for event in parsed(trace) if event["ph"] in "be"] == [
        ("b", 0.005),
        ("e", 0.025),
        ("b", 0.015),
        ("e", 0.025),
    ]


# ---- whatever happens ---------------------------------------------------------------------------------


class Loader:
    """Plays a loader with up to three epochs at once on two threads, which takes answers in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000
        self.thread = PID
        self.epochs = 0
        self.live: dict[int, dict[str, Any]] = {}
        self.trace: Any = MagicMock()  # no trace has begun

    def tick(self) -> int:
        self.now += self.random.choice((1, 2, 10, 100))
        return self.now

    def begin(self) -> None:
        self.epochs += 1
        self.trace.began(self.epochs, self.tick())
        live = {"free": [self.now] * 2, "next": 0, "loading": {}, "ready": [], "attempt": 0}
        self.live[self.epochs] = live
        for _ in range(self.random.randrange(4)):
            self.send(self.epochs, live)
        self.trace.left(self.epochs, None, self.tick())

    def send(self, epoch: int, live: dict[str, Any]) -> None:
        self.trace.drew(epoch, self.tick(), self.tick())
        self.trace.sent(epoch, live["next"], self.tick())
        live["loading"][live["next"]] = self.now
        live["next"] += 1

    def answer(self, epoch: int, live: dict[str, Any]) -> None:
        seq = self.random.choice(sorted(live["loading"]))
        sent, worker = live["loading"].pop(seq), self.random.randrange(2)
        times = [max(sent, live["free"][worker]) + self.random.choice((0, 1, 50))]
        for _ in range(3):
            times.append(times[-1] + self.random.choice((0, 1, 50)))
        self.now = max(self.now, times[-1])
        live["free"][worker] = times[-1]
        outcome = self.random.choice((BATCH, BATCH, BATCH, ERROR, ENDED))
        self.trace.answered(epoch, worker, 100 * epoch + worker, answer(seq, *times, outcome=outcome))
        if outcome != ENDED:
            live["ready"].append(seq)

    def call(self, epoch: int, live: dict[str, Any]) -> None:
        self.thread = self.random.choice((PID, PID, 51))
        self.trace.entered(epoch, self.tick())
        for _ in range(self.random.randrange(3)):
            self.trace.waited(epoch, self.random.choice(("workers", "memory", "head_of_line")), *self.span())
            if live["loading"]:
                self.answer(epoch, live)
            self.send(epoch, live)
        if self.random.random() < 0.3:
            self.trace.used_device(epoch, *self.span())
        if live["ready"]:
            seq = live["ready"].pop(self.random.randrange(len(live["ready"])))
            self.trace.left(epoch, seq, self.tick())
        elif self.random.random() < 0.5:
            self.trace.raised(epoch, None, KeyError("the sampler's"), self.tick())
            self.trace.left(epoch, None, self.now)
        else:
            self.trace.left(epoch, None, self.tick())
            self.trace.ended(epoch, self.now)
            del self.live[epoch]

    def span(self) -> tuple[int, int]:
        return self.tick(), self.tick()

    def run(self) -> list[Event]:
        begins = self.random.choice((0, 0, 5))
        for step in range(40):
            if step == begins:
                self.trace = Events(self.tick(), PID, lambda: self.thread)
            if not self.live or (len(self.live) < 3 and self.random.random() < 0.1):
                self.begin()
            epoch = self.random.choice(sorted(self.live))
            if self.random.random() < 0.05:
                self.trace.dropped(epoch, self.tick())
                del self.live[epoch]
            else:
                self.call(epoch, self.live[epoch])
        self.trace.close(self.tick())
        return parsed(self.trace)


@given(seed=st.integers(0, 2**32))
def test_whatever_happens_spans_nest_and_batches_add_up(seed: int) -> None:
    found = Loader(seed).run()
    check(found)
    for life in batches(found).values():
        edges = [interval(part) for part in life]
        assert all(before[1] == after[0] for before, after in pairwise(edges))
