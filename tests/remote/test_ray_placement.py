"""What is asked of Ray, and what becomes of its answers. Ray is played here, and real in `end_to_end`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader import RayWorkers
from fastq_loader.remote import ray_placement
from fastq_loader.remote.connection import Address
from fastq_loader.remote.proxy import NoPlace, Place
from fastq_loader.remote.ray_placement import RayPlacement

NODE = "f" * 56


class ActorDiedError(Exception):
    actor_init_failed = False


ActorUnavailableError, GetTimeoutError = (type(name, (Exception,), {}) for name in ("Unavailable", "Timeout"))


class Method:
    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []
        self.given: list[Any] = []

    def remote(self, *given: Any) -> Any:
        self.given.append(given)
        self.calls.append(Future())
        return self.calls[-1]

    def answer(self, result: Any) -> None:
        call = next(call for call in self.calls if not call.done())
        if isinstance(result, Exception):
            call.set_exception(result)
        else:
            call.set_result(result)


class Actor:
    def __init__(self) -> None:
        self.attach, self.stay = Method(), Method()

    @property
    def asked(self) -> bool:
        return not self.attach.calls[-1].done()

    def place(self, number: int, port: int = 4711) -> Place:
        self.attach.answer((NODE, "10.0.0.7", port, number))
        return Place(Address("10.0.0.7", port), number, "10.0.0.7 (Ray's node ffffffffffff)")


class Ray:
    exceptions = SimpleNamespace(
        ActorDiedError=ActorDiedError,
        ActorUnavailableError=ActorUnavailableError,
        GetTimeoutError=GetTimeoutError,
    )

    def __init__(self) -> None:
        self.running = False
        self.lock = threading.RLock()  # that Ray takes for its start and its end
        self.driver = "this process"
        self.joined: list[Any] = []
        self.options: dict[str, Any] = {}
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.there = {"CPU": 8.0}
        self.modules: dict[str, Any] = {}
        self.status = '{"autoscaler_report": {"node_type_mapping": {"f": "node_f"}}}'

    def is_initialized(self) -> bool:
        return self.running

    def init(self, address: Any) -> None:
        self.joined.append(address)
        self.running = True

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(remote=self._make)

    def _make(self) -> Actor:
        self._must_run()
        self.actors.append(Actor())
        return self.actors[-1]

    def _must_run(self) -> None:
        assert self.running, "Ray would start anew by itself"
        assert self.lock._is_owned(), "Ray could be shut down now"  # type: ignore[attr-defined]

    def cluster_resources(self) -> dict[str, float]:
        return self.there

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.there}, {"Alive": False, "Resources": {"decoder": 1.0}}]

    def put(self, data: bytes) -> Any:
        self._must_run()
        return data

    def get_runtime_context(self) -> Any:
        self._must_run()
        return SimpleNamespace(get_worker_id=lambda: self.driver)

    def kill(self, actor: Actor) -> None:
        self._must_run()
        self.killed.append(actor)

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self._must_run()
        done = [reference for reference in references if reference.done()]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: Future[Any], timeout: float = 0) -> Any:
        self._must_run()
        if not reference.done():
            raise GetTimeoutError
        return reference.result()


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_placement, "time", clock)
    return clock


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Ray:
    played = Ray()
    played.modules = {
        "ray": played,
        "ray._private.worker": SimpleNamespace(_connect_or_shutdown_lock=played.lock),
        "ray._private.state": SimpleNamespace(state=SimpleNamespace(get_cluster_config=lambda: None)),
        "ray.experimental.internal_kv": SimpleNamespace(_internal_kv_get=lambda key: played.status),
    }
    monkeypatch.setattr(importlib, "import_module", lambda name: played.modules[name])
    return played


def started(workers: RayWorkers, places: int = 1, flexible: bool = True) -> RayPlacement:
    placement = RayPlacement(workers, flexible)
    placement.start(b"spec", places)
    return placement


@pytest.fixture
def placement(ray: Ray) -> Iterator[RayPlacement]:
    placement = started(RayWorkers(ports=(5, 6)))
    yield placement
    placement.close()


def lose(placement: RayPlacement, place: Place) -> None:
    assert placement.find([place], 0) == []


def test_ray_that_runs_is_used_and_else_it_is_joined(ray: Ray) -> None:
    for expected in ([None], [None]):
        started(RayWorkers()).close()
        assert ray.joined == expected
    ray.running = False
    started(RayWorkers(address="auto")).close()
    assert ray.joined == [None, "auto"]
    RayPlacement(RayWorkers()).close()  # it was not started


def test_a_place_is_found_once_an_actor_has_one(ray: Ray, placement: RayPlacement) -> None:
    assert placement.find([], 1) == []
    assert placement.pause is not None
    (actor,) = ray.actors
    assert actor.attach.given == [(b"spec", [5, 6])]
    expected = actor.place(3)
    assert placement.find([], 0) == []
    assert placement.find([], 2) == [expected]
    assert placement.find([], 1) == []
    assert placement.pause is None, "nothing is asked of Ray meanwhile"
    assert placement.death(expected) == "", "its actor is there"
    placement.close()
    assert ray.killed == [actor]


@pytest.mark.parametrize("error", [ActorDiedError, ActorUnavailableError, OSError, None])
def test_a_dead_actor_makes_way(error: Any, ray: Ray, placement: RayPlacement, clock: Clock) -> None:
    (actor,) = ray.actors
    place = actor.place(3)
    placement.find([], 1)
    lose(placement, place)
    text = "The actor died.\n\tclass_name: x\nThe actor is dead because x. Some common causes include: (1)"
    if error is None:
        clock.now += 4.9
        placement.find([], 1)
        assert len(ray.actors) == 1
        clock.now += 0.2
    else:
        actor.attach.answer(error(text))
    placement.find([], 1)
    assert ray.killed == [actor]
    assert len(ray.actors) == 2
    assert placement.death(place) == (
        "The actor is dead because x" if error else "its machine does not answer"
    )


def test_ray_is_asked_at_once_of_a_place_lost_with_its_actor(ray: Ray, placement: RayPlacement) -> None:
    place = ray.actors[0].place(3)
    placement.find([], 1)
    ray.actors[0].stay.answer(ActorDiedError("The actor died because it was killed by the memory monitor."))
    assert placement.death(place) == "The actor died because it was killed by the memory monitor"


def test_actors_wait_for_room_and_are_made_again(ray: Ray, placement: RayPlacement, clock: Clock) -> None:
    placement.find([], 1)
    clock.now += 10**6
    assert placement.find([], 1) == []
    assert len(ray.actors) == 1
    for number in range(10):
        ray.actors[number].attach.answer(ActorDiedError("its node has died"))
        assert placement.find([], 1) == []
    assert len(ray.actors) == 11


def test_where_no_host_starts_those_that_wait_hear_why_and_no_more_is_tried(ray: Ray) -> None:
    placement = started(RayWorkers(), places=2)
    for made in (2, 4, 6):  # those that were made together fail together, once
        assert len(ray.actors) == made
        for actor in ray.actors[-2:]:
            actor.attach.answer(OSError("Traceback\nOSError: no torch there"))
        found = placement.find([], 2)
    assert found == [NoPlace("OSError: no torch there")] * 2
    assert placement.find([], 1) == found[:1]
    assert len(ray.actors) == 6
    placement.close()


def test_an_actor_that_cannot_be_made_is_a_failure(ray: Ray, placement: RayPlacement) -> None:
    error = ActorDiedError("The actor died because of an error raised in its creation task, so there")
    error.actor_init_failed = True
    for number in range(3):
        ray.actors[number].attach.answer(error)
        found = placement.find([], 1)
    assert found == [NoPlace(str(error))]


@pytest.mark.parametrize("again", [False, True], ids=["shut down", "and started again"])
def test_ray_that_was_shut_down_is_not_touched(ray: Ray, placement: RayPlacement, again: bool) -> None:
    place = ray.actors[0].place(3)
    placement.find([], 1)
    ray.running, ray.driver = again, "another one"
    assert placement.death(place) == "Ray was shut down"
    for _ in range(2):
        assert placement.find([place], 2) == [NoPlace("Ray was shut down")] * 2
    placement.close()
    assert len(ray.actors) == 1
    assert not ray.killed


def test_while_ray_starts_or_ends_it_is_not_touched(ray: Ray, placement: RayPlacement) -> None:
    place = ray.actors[0].place(3)
    found: list[Any] = []
    with ray.lock:
        thread = threading.Thread(target=lambda: found.append(placement.find([place], 1)))
        thread.start()
        thread.join()
    assert found == [[]]
    assert placement.find([], 1) == []
    assert len(ray.actors[0].attach.calls) == 2, "what was lost meanwhile is not forgotten"


def test_at_the_exit_of_the_process_ray_is_called_no_more(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Any] = []
    played = SimpleNamespace(
        register=exits.append, unregister=lambda one: exits.remove(one) if one in exits else None
    )
    monkeypatch.setattr(ray_placement, "atexit", played)
    placement = started(RayWorkers())
    exits[0]()
    ray.actors[0].place(1)
    assert placement.find([], 1) == []
    placement.close()
    assert exits == [ray_placement._disarm]


@pytest.mark.parametrize(
    ("ranks", "flexible", "given", "actors"),
    [
        ("2", True, {}, 3),
        ("2", True, {"num_cpus": 1.5}, 2),
        ("2", True, {"num_gpus": 0.5}, 2),
        ("16", True, {}, 1),
        ("2", True, {"num_cpus": 0}, 5),
        ("1", True, {}, 5),
        ("", True, {}, 5),
        ("2", False, {}, 5),
    ],
)
def test_a_rank_asks_for_its_part_of_the_cluster(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, ranks: str, flexible: bool, given: dict[str, Any], actors: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    ray.there = {"CPU": 7.0, "GPU": 2.0}
    started(RayWorkers(**given), 5, flexible).close()
    assert len(ray.actors) == actors


def test_ranks_are_those_of_torch_distributed(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    played = SimpleNamespace(is_available=bool, is_initialized=lambda: True, get_world_size=lambda: 4)
    monkeypatch.setattr(ray_placement, "distributed", played)
    assert ray_placement._ranks() == 1
    played.is_available = lambda: True
    assert ray_placement._ranks() == 4


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"resources": {"decoder": 1}}, r"resources={'decoder': 1}\): .* has 1 decoder \(the most is 0\)"),
        ({"num_cpus": 9}, r"num_cpus=9\): .* has 9 CPU \(the most is 8\)"),
        (
            {"num_cpus": 9, "num_gpus": 1},
            r"num_cpus=9, num_gpus=1\): .* 9 CPU .* and 1 GPU \(the most is 0\)",
        ),
    ],
)
def test_what_no_machine_has_is_an_error_at_the_start(ray: Ray, given: dict[str, Any], lacks: str) -> None:
    placement = RayPlacement(RayWorkers(**given))
    with pytest.raises(ValueError, match=lacks):
        placement.start(b"spec", 1)
    placement.close()
    assert not ray.actors


@pytest.mark.parametrize(
    ("groups", "raises"),
    [([(4, 2)], False), ([(-1, 1)], False), ([(0, 1)], True), ([(4, 0)], True), ([], True)],
)
def test_what_an_autoscaler_may_add_counts(
    ray: Ray, groups: list[tuple[int, int]], raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [SimpleNamespace(max_count=most, resources={"CPU": 1, "decoder": has}) for most, has in groups]
    ray.modules["ray._private.state"].state.get_cluster_config = lambda: SimpleNamespace(
        node_group_configs=kinds
    )
    placement = RayPlacement(RayWorkers(resources={"decoder": 1}))
    with pytest.raises(ValueError, match="decoder") if raises else nullcontext():
        placement.start(b"spec", 1)
    placement.close()
    assert not caplog.records


@pytest.mark.parametrize("status", ['{"autoscaler_report": {"node_type_mapping": {"f": "ray.head"}}}', "{}"])
def test_an_unknown_autoscaler_is_a_warning(ray: Ray, status: str, caplog: pytest.LogCaptureFixture) -> None:
    ray.status = status
    placement = RayPlacement(RayWorkers(resources={"decoder": 1}))
    placement.start(b"spec", 1)
    placement.close()
    [record] = caplog.records
    assert "no machine of the Ray cluster has 1 decoder (the most is 0)" in record.getMessage()
