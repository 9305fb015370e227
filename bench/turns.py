"""The moments between and around epochs, for loaders that take torch's arguments.

Every repetition makes a new loader, so that its first epoch writes to memory nobody has touched before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any

from bench.measure import Tick, reason, time_limit
from bench.peers import PEERS, LoaderSettings, Peer, Unsupported, peer_class
from bench.proc import wait_until_quiet
from bench.results import MomentResult, Repeated
from bench.workloads import Load

DROP_INS = ("torch", "fastq_loader")
EPOCH = 64  # batches
DEEP_PREFETCH = 8
LIMIT_S = 120.0
STEP_S = 0.05  # of a training step, which workers that are not needed any more can use to end

FIRST_BATCH = "first batch"
FIRST_EPOCH = "first epoch, from its first batch to its last"
TURN_PERSISTENT = "epoch turn, persistent workers"
TURN_NEW_WORKERS = "epoch turn, new workers"
TURN_AFTER_STEP = f"epoch turn, new workers, after a step of {STEP_S * 1e3:.0f} ms"
RESTART = f"break at batch 1, prefetch {DEEP_PREFETCH}: first batch of the next epoch"


def _persistent(load: Load, settings: LoaderSettings, make: type[Peer]) -> dict[str, float]:
    with _peer(make, load, settings) as peer:
        started = perf_counter()
        batches = peer.epoch()
        held = next(batches)
        first = perf_counter()
        for _ in range(EPOCH - 1):
            held = next(batches)
        last = perf_counter()
        turn = _turn(peer, batches)
        del held, batches
    return {FIRST_BATCH: first - started, FIRST_EPOCH: last - first, TURN_PERSISTENT: turn}


def _new_workers(load: Load, settings: LoaderSettings, make: type[Peer]) -> dict[str, float]:
    turns = {}
    for moment, step in ((TURN_NEW_WORKERS, 0.0), (TURN_AFTER_STEP, STEP_S)):
        with _peer(make, load, replace(settings, persistent=False)) as peer:
            batches = peer.epoch()
            for _ in range(EPOCH):
                next(batches)
            sleep(step)
            turns[moment] = _turn(peer, batches)
            del batches
    return turns


def _break(load: Load, settings: LoaderSettings, make: type[Peer]) -> dict[str, float]:
    with _peer(make, load, replace(settings, prefetch_factor=DEEP_PREFETCH)) as peer:
        batches = peer.epoch()
        next(batches)
        started = perf_counter()
        batches = peer.epoch()
        next(batches)
        ended = perf_counter()
        del batches
    return {RESTART: ended - started}


SCENES = (_persistent, _new_workers, _break)


def measure_turns(
    workload: str, load: Load, names: Sequence[str], settings: LoaderSettings, repetitions: int, tick: Tick
) -> list[MomentResult]:
    """The peers, all of them drop-ins, take turns; `tick` is called with a name after its scenes."""
    load = load.shortened(EPOCH)
    seconds: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    for number in range(repetitions):
        for name in names if number % 2 == 0 else reversed(names):
            try:
                if load.iterable:
                    raise Unsupported("the epochs of a stream have a length of their own")
                for scene in SCENES if name not in failures else ():
                    wait_until_quiet()
                    with time_limit(LIMIT_S):
                        taken = scene(load, settings, peer_class(name))
                    for moment, value in taken.items():
                        seconds.setdefault(moment, {}).setdefault(name, []).append(value)
            except Exception as error:
                failures[name] = reason(error)
            tick(name)
    moments = seconds or {FIRST_BATCH: {}}
    return [
        MomentResult(
            moment,
            workload,
            settings.num_workers,
            settings.start_method,
            {
                name: Repeated(PEERS[name].label, failure=failures[name])
                if name in failures
                else Repeated(PEERS[name].label, moments[moment][name])
                for name in names
            },
        )
        for moment in moments
    ]


def _turn(peer: Peer, batches: Iterator[Any]) -> float:
    """Seconds from asking for what comes after the last batch to the first batch of the next epoch."""
    started = perf_counter()
    if next(batches, None) is not None:
        raise RuntimeError(f"an epoch of {EPOCH} batches went on")
    following = peer.epoch()
    next(following)
    return perf_counter() - started  # before `following` goes, and its workers with it


@contextmanager
def _peer(make: type[Peer], load: Load, settings: LoaderSettings) -> Iterator[Peer]:
    peer = make(load, settings)
    try:
        yield peer
    finally:
        peer.close()
