"""Shares of a cluster among the ranks of a job, each of which has a loader of its own.

Runs in the consumer, on the thread of the pool. Pure, except for the store of a `Board`.

Each rank requests an equal part of the resources that others leave to the ranks. Each publishes how many of
its workers have room, and ranks with several workers give up room for a rank without any.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

Resources = Mapping[str, float]

#: Seconds without room after which another rank gives some up, and after which the next one does. Ray takes
#: some seconds to start an actor that has room.
TURN = 10
#: Namespace of the keys in the store.
_SPACE = "fastq_loader"


def used(total: Resources, free: Resources) -> dict[str, float]:
    """Subtract resources by name."""
    return {name: amount - free.get(name, 0) for name, amount in total.items()}


def share(room: Resources, takes: Resources, ranks: int, workers: int) -> int:
    """Workers of each rank: an equal part of the room, at least one, and at most `workers`.

    Args:
        room: resources of the cluster that others leave free, by name.
        takes: resources of each worker.
    """
    parts = [math.floor(room.get(name, 0) / ranks / amount + 1e-9) for name, amount in takes.items()]
    return min(workers, max(1, min(parts, default=workers)))


class Holding(NamedTuple):
    """State of a rank's pool, published to the others.

    Attributes:
        workers: number of workers that have room.
        waited: whole seconds in which none had any.
    """

    workers: int
    waited: int

    @property
    def starves(self) -> bool:
        """Whether others should leave room to it."""
        return not self.workers and self.waited >= TURN


def gifts(pools: Mapping[str, Holding], mine: str) -> set[tuple[str, int]]:
    """Workers that the pool `mine` should give up: for each a starving pool and its turn.

    In each turn one of the pools with more than one worker, the richest first, gives one up for each starving
    pool. It may be dead, or its room may not fit; then the next one follows in the next turn.
    """
    rich = sorted(
        (name for name in pools if pools[name].workers > 1), key=lambda name: (-pools[name].workers, name)
    )
    starving = sorted(name for name in pools if pools[name].starves)
    turns = [(name, pools[name].waited // TURN) for name in starving]
    return {
        (name, turn)
        for at, (name, turn) in enumerate(turns)
        if rich and rich[(at + turn - 1) % len(rich)] == mine
    }


def waits_for(starting: Sequence[str | None], takes: Resources, total: Resources, free: Resources) -> str:
    """Describe why workers have no place yet.

    Args:
        starting: for each of them the machine where it has room, or None.
        takes: resources of each worker.
        total: resources of the cluster.
        free: unused resources of the cluster.
    """
    reasons = []
    if waiting := starting.count(None):
        each = " and ".join(f"{amount:g} {name}" for name, amount in takes.items())
        has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in takes)
        room = f" (each takes {each}; free in the cluster: {has})" if takes else ""
        reasons.append(f"workers that wait for a machine with room: {waiting}{room}")
    if machines := sorted({node for node in starting if node}):
        reasons.append(f"the dataset is still being opened on {', '.join(machines)}")
    return " and ".join(reasons) or "no worker is being started"


class Board:
    """The pools of a job's ranks: a key for each in the store of Ray's head.

    All variable data are in the key, so that one request reads all pools. The value is the resources that
    others than these pools used before the first of them began.

    Args:
        store: the module `ray.experimental.internal_kv`.
        job: a name common to its ranks, without blanks.
        driver: Ray's name for the program of this process, its "job".
    """

    def __init__(self, store: Any, job: str, driver: str) -> None:
        self._store = store
        self._prefix = f"{job} "
        self.name = f"{driver}-{uuid.uuid4().hex}"
        self._key = ""
        self._foreign = b""
        self._first: dict[str, int] = {}  # `waited` of pools without room when they were first read

    def join(self, others: Resources, ended: Collection[str]) -> dict[str, float]:
        """Publish this pool; return the used resources that do not belong to the ranks' pools. Removes the
        entries of programs that have ended."""
        foreign = dict(others)
        for key in self._keys():
            if key.decode().split()[1].partition("-")[0] in ended:
                self._store._internal_kv_del(key, namespace=_SPACE)
            elif value := self._store._internal_kv_get(key, namespace=_SPACE):
                for name, amount in json.loads(value).items():
                    foreign[name] = min(amount, foreign.get(name, 0))
        self._foreign = json.dumps(foreign).encode()
        self._publish(Holding(0, 0))
        return foreign

    def exchange(self, mine: Holding) -> dict[str, Holding]:
        """Publish this pool's state; return the states of all pools. Pools without room whose `waited` does
        not grow are left out: their process has died, or they are new."""
        self._publish(mine)
        pools = {}
        for key in self._keys():
            _, name, *numbers = key.decode().split()
            holding = Holding(*map(int, numbers))
            if holding.workers:
                self._first.pop(name, None)
            elif self._first.setdefault(name, holding.waited) == holding.waited:
                continue
            pools[name] = holding
        return {**pools, self.name: mine}

    def leave(self) -> None:
        """Remove this pool."""
        self._store._internal_kv_del(self._key, namespace=_SPACE)

    def _keys(self) -> list[bytes]:
        keys: list[bytes] = self._store._internal_kv_list(self._prefix, namespace=_SPACE)
        return keys

    def _publish(self, mine: Holding) -> None:
        before, self._key = self._key, f"{self._prefix}{self.name} {mine.workers} {mine.waited}"
        if self._key == before:
            return
        self._store._internal_kv_put(self._key, self._foreign, namespace=_SPACE)
        if before:
            self._store._internal_kv_del(before, namespace=_SPACE)


class Sharing:
    """Room that one rank's pool leaves to ranks without any.

    Args:
        board: the ranks' pools.
        now: time in seconds.

    Attributes:
        others_starve: whether a rank has no room while this one has some: then it starts no more workers.
    """

    def __init__(self, board: Board, now: float) -> None:
        self.board = board
        self.others_starve = False
        self._gifts: set[tuple[str, int]] = set()  # room given up so far
        self._had_room, self._looked = now, 0.0  # times of the last occurrence

    def look(self, now: float, workers: int, pause: float) -> int | None:
        """Compare this pool, with room for so many workers, with the others; at most once in `pause` seconds.
        Returns how many workers to give up; None if no other rank needs their room."""
        if workers:
            self._had_room = now
        if now < self._looked + pause:
            return None
        self._looked = now
        try:
            pools = self.board.exchange(Holding(workers, int(now - self._had_room)))
        except Exception:  # the head of the cluster may be unreachable for a while
            return None
        starving = {name for name, pool in pools.items() if pool.starves}
        self._gifts = {(name, turn) for name, turn in self._gifts if name in starving}
        self.others_starve = bool(starving) and workers > 0
        if not self.others_starve:
            return None
        due = gifts(pools, self.board.name)
        new, self._gifts = due - self._gifts, self._gifts | due
        return len(new)
