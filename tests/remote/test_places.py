"""Who gets which place: stand-ins and the placement are played, the pipes are real."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from fastq_loader.remote.control import Dying, NoPlace, Place, Told, Up, Waiting
from fastq_loader.remote.link import Address
from fastq_loader.remote.places import Found, Placement, Places, Tie
from tests.conftest import wait_until
from tests.remote.test_control import TOLD
from tests.support.hosts import LocalHosts

SECONDS = 10  # against hanging


class Played:
    """Notes what it is asked; places are found by `find`."""

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.released: list[tuple[int, str]] = []
        self.fails = False

    def start(self, spec: bytes, found: Found) -> None:
        self.found = found

    def acquire(self, number: int) -> None:
        if self.fails:
            raise OSError("no machine is left")
        self.asked.add(number)

    def release(self, number: int, why: str) -> None:
        self.released.append((number, why))

    def find(self, number: int) -> Place:
        place = Place(number, Address("127.0.0.1", number), f"node-{number}")
        self.asked.remove(number)
        self.found(place)
        return place


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def places(played: Played) -> Iterator[Places]:
    places = Places(played)  # type: ignore[arg-type]
    places.start(2, b"spec")
    yield places
    places.close()


def stand_in(places: Places, told: Told = TOLD) -> tuple[Connection[Any, Any], Tie]:
    """The stand-in's end of its pipe, when it waits."""
    mine, its = Pipe()
    tie = places.tie(mine, told)
    assert its.recv() == told
    its.send(Waiting())
    return its, tie


def received(pipe: Connection[Any, Any]) -> Any:
    assert pipe.poll(SECONDS)
    return pipe.recv()


def test_places_are_sought_before_anybody_waits_and_the_first_goes_to_the_first(
    places: Places, played: Played
) -> None:
    assert sorted(played.asked) == [1, 2]
    ready = played.find(2)
    pipe, tie = stand_in(places)
    assert received(pipe) == ready
    pipe.send(Up(70))
    assert wait_until(lambda: tie.pid == 70, SECONDS)
    other, _ = stand_in(places)
    assert not other.poll(0.05)
    assert received(other) if played.find(1) else None
    pipe.close()
    other.close()


def test_one_that_lost_its_place_gets_another_one(places: Places, played: Played) -> None:
    played.find(1)
    pipe, tie = stand_in(places)
    received(pipe)
    pipe.send(Waiting("the connection broke"))
    assert wait_until(lambda: played.released == [(1, "the connection broke")], SECONDS)
    assert wait_until(lambda: 3 in played.asked, SECONDS)
    assert received(pipe) if played.find(3) else None
    assert tie.place is not None
    assert tie.place.number == 3
    pipe.close()


def test_for_one_that_dies_a_place_is_sought_for_its_successor(places: Places, played: Played) -> None:
    played.find(1)
    pipe, tie = stand_in(places)
    received(pipe)
    pipe.send(Dying("of it"))
    pipe.close()
    places.read(tie)  # what it said is known as soon as anybody asks
    assert tie.why == "of it"
    assert wait_until(lambda: (1, "of it") in played.released and 3 in played.asked, SECONDS)


def test_when_the_pool_ends_no_place_is_sought(places: Places, played: Played) -> None:
    played.find(1)
    pipe, _ = stand_in(places)
    received(pipe)
    places.stop()
    pipe.close()
    assert wait_until(lambda: played.released == [(1, "")], SECONDS)
    assert sorted(played.asked) == [2]


def test_where_a_far_worker_is_and_was(places: Places, played: Played) -> None:
    pipe, tie = stand_in(places)
    assert places.where(tie) == (None, 0)
    place = played.find(1)
    assert received(pipe) == place
    assert places.where(tie) == (place, 0)
    pipe.send(Up(70))
    assert places.where(tie) == (place, 70)
    pipe.close()
    assert places.where(tie) == (place, 70)


def test_what_was_said_is_known_to_whoever_asks_before_the_thread_has_seen_it(played: Played) -> None:
    places = Places(played)  # type: ignore[arg-type]
    pipe, tie = stand_in(places)
    pipe.send(Up(70))
    assert places.where(tie) == (None, 70)
    pipe.close()
    places.close()


def test_where_there_is_no_place_the_one_that_waits_hears_why(places: Places, played: Played) -> None:
    played.found(NoPlace(1, "none is left"))
    pipe, tie = stand_in(places)
    assert received(pipe) == NoPlace(1, "none is left")
    assert tie.place is None
    played.fails = True
    pipe.close()
    assert wait_until(lambda: played.released == [(1, "")], SECONDS)
    successor, _ = stand_in(places)
    assert received(successor) == NoPlace(3, "OSError: no machine is left")
    successor.close()


def test_who_has_a_place_that_is_gone_is_told(places: Places, played: Played) -> None:
    played.find(1)
    pipe, _ = stand_in(places)
    received(pipe)
    other, _ = stand_in(places)
    played.found(NoPlace(1, "its actor died"))
    assert received(pipe) == NoPlace(1, "its actor died")
    assert not played.released
    pipe.send(Waiting("its actor died"))
    assert wait_until(lambda: played.released == [(1, "its actor died")], SECONDS)
    played.found(NoPlace(1, "again, too late"))
    found = played.find(2)
    assert received(pipe) == found
    assert wait_until(lambda: 3 in played.asked, SECONDS)
    found = played.find(3)
    assert received(other) == found
    pipe.close()
    other.close()


def test_a_place_that_is_gone_before_anybody_had_it_is_replaced(places: Places, played: Played) -> None:
    played.find(1)
    played.found(NoPlace(1, "its actor died"))
    assert wait_until(lambda: played.released == [(1, "its actor died")] and 3 in played.asked, SECONDS)
    pipe, _ = stand_in(places)
    found = played.find(3)
    assert received(pipe) == found
    pipe.close()


def test_a_place_that_is_found_when_all_is_over_is_of_no_use(played: Played) -> None:
    places = Places(played)  # type: ignore[arg-type]
    places.start(1, b"spec")
    places.close()
    played.find(1)


def test_what_a_placement_raises_at_the_start_is_raised(played: Played) -> None:
    played.fails = True
    places = Places(played)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no machine"):
        places.start(1, b"spec")
    places.close()


def test_its_thread_takes_no_signals(places: Places) -> None:
    status = Path(f"/proc/self/task/{places._thread.native_id}/status").read_text()
    blocked = int(re.findall(r"SigBlk:\s+(\w+)", status)[0], 16)
    assert blocked >> (signal.SIGINT - 1) & 1


def test_the_placement_of_the_tests_is_one() -> None:
    placement: Placement = LocalHosts()
    for name, method in inspect.getmembers(Placement, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(LocalHosts, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters)
    placement.close()
