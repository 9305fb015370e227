"""What is asked of Ray, and what becomes of its answers. Ray is played here, and real in `end_to_end`."""

from __future__ import annotations

import base64
import importlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader import RayWorkers
from fastq_loader.extras.remote import ray_placement
from fastq_loader.extras.remote.connection import Address
from fastq_loader.extras.remote.proxy import NoPlace, Place
from fastq_loader.extras.remote.ray_placement import RayPlacement
from tests.conftest import run_script

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
        self.where, self.open, self.run = Method(), Method(), Method()

    def place(self, number: int, port: int = 4711) -> Place:
        if not self.where.calls[0].done():
            self.where.answer("10.0.0.7")
        self.open.answer((NODE, "10.0.0.7", port, number))
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
        self.taken = {"CPU": 0.0}
        self.autoscaler = '{"autoscaler_report": {"node_type_mapping": {"f": "node_f"}}}'
        self.modules: dict[str, Any] = {}

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

    def available_resources(self) -> dict[str, float]:
        self._must_run()
        return {name: amount - self.taken.get(name, 0) for name, amount in self.there.items()}

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
    played, real = Ray(), importlib.import_module
    played.modules = {
        "ray": played,
        "ray._private.worker": SimpleNamespace(_connect_or_shutdown_lock=played.lock),
        "ray._private.state": SimpleNamespace(state=SimpleNamespace(get_cluster_config=lambda: None)),
        "ray.experimental.internal_kv": SimpleNamespace(_internal_kv_get=lambda key: played.autoscaler),
    }
    monkeypatch.setattr(importlib, "import_module", lambda name: played.modules.get(name) or real(name))
    return played


def started(workers: RayWorkers, places: int = 1, flexible: bool = True) -> RayPlacement:
    placement = RayPlacement(workers, flexible)
    placement.start(b"setup", places)
    return placement


@pytest.fixture
def placement(ray: Ray) -> Iterator[RayPlacement]:
    placement = started(RayWorkers(ports=(5, 6)))
    yield placement
    placement.close()


def lose(placement: RayPlacement, place: Place) -> None:
    assert placement.find([place], 0) == []


@pytest.mark.parametrize("error", [ActorDiedError, ActorUnavailableError, OSError, None])
def test_a_dead_actor_makes_way(error: Any, ray: Ray, placement: RayPlacement, clock: Clock) -> None:
    (actor,) = ray.actors
    place = actor.place(3)
    placement.find([], 1)
    lose(placement, place)
    assert placement.pause is not None, "Ray is asked again"
    text = "The actor died.\n\tclass_name: x\nThe actor is dead because x. Some common causes include: (1)"
    if error is None:
        clock.now += 0.9
        placement.find([], 1)
        assert not ray.killed
        clock.now += 0.2
    else:
        actor.run.answer(error(text))
        assert placement.death(place) == "The actor is dead because x", "it is asked at once"
    placement.find([], 1)
    assert ray.killed == [actor], "whatever it is doing"
    assert len(ray.actors) == 2
    assert placement.death(place) == ("The actor is dead because x" if error else "")


def test_actors_wait_for_room_and_are_made_again(ray: Ray, clock: Clock) -> None:
    placement = started(RayWorkers(start_timeout=0))
    placement.find([], 1)
    clock.now += 10**6
    assert placement.find([], 1) == []
    assert len(ray.actors) == 1
    for number in range(10):
        ray.actors[number].open.answer(ActorDiedError("its node has died"))
        assert placement.find([], 1) == []
    assert len(ray.actors) == 11
    placement.close()


ROOM = "workers that wait for a machine with room: {} (each takes 1 CPU; free in the cluster: 2 of 8 CPU)"
OPENING = "the dataset is still being opened on 10.0.0.7"


@pytest.mark.parametrize(
    ("opening", "reason"), [(0, ROOM.format(2)), (1, f"{ROOM.format(1)} and {OPENING}"), (2, OPENING)]
)
@pytest.mark.parametrize("flexible", [True, False])
def test_a_wait_for_the_first_place_ends_and_says_what_it_waited_for(
    ray: Ray, clock: Clock, opening: int, reason: str, flexible: bool
) -> None:
    ray.taken = {"CPU": 6.0}
    placement = started(RayWorkers(start_timeout=60), 2, flexible)
    for actor in ray.actors[:opening]:
        actor.where.answer("10.0.0.7")
    assert placement.find([], 2) == []
    clock.now += 60
    assert placement.find([], 2) == []
    clock.now += 0.1
    fix = "(free or add resources, or give it more seconds)"
    expected = NoPlace(f"not within RayWorkers(start_timeout=60) seconds: {reason} {fix}")
    assert placement.find([], 2) == [expected] * 2
    assert placement.find([], 1) == [expected], "the next ones do not wait as long"
    assert ray.killed == ray.actors
    assert len(ray.actors) == 2
    placement.close()


@pytest.mark.parametrize("flexible", [True, False])
def test_few_workers_do_the_work_of_many_only_where_they_may(ray: Ray, clock: Clock, flexible: bool) -> None:
    placement = started(RayWorkers(start_timeout=60), 2, flexible)
    place = ray.actors[0].place(1)
    assert placement.find([], 2) == [place]
    clock.now += 100
    found = placement.find([], 1)
    if flexible:
        assert found == []
        assert not ray.killed, "those beyond the first may wait for ever"
    else:
        [none] = found
        assert "wait for a machine with room: 1 (" in str(none)
    placement.close()


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({"resources": {"decoder": 1}}, r"resources={'decoder': 1}\): .* has 1 decoder \(the most is 0\)"),
        (
            {"num_cpus": 9, "num_gpus": 1},
            r"num_cpus=9, num_gpus=1\): .* 9 CPU .* and 1 GPU \(the most is 0\)",
        ),
    ],
)
def test_resources_that_no_machine_has_are_an_error_at_the_start(
    ray: Ray, given: dict[str, Any], lacks: str
) -> None:
    placement = RayPlacement(RayWorkers(**given))
    with pytest.raises(ValueError, match=lacks):
        placement.start(b"setup", 1)
    placement.close()
    assert not ray.actors


@pytest.mark.parametrize(
    ("groups", "raises"),
    [([(4, 2)], False), ([(-1, 1)], False), ([(0, 1)], True), ([(4, 0)], True), ([], True)],
)
def test_resources_that_an_autoscaler_may_add_count(
    ray: Ray, groups: list[tuple[int, int]], raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [SimpleNamespace(max_count=most, resources={"CPU": 1, "decoder": has}) for most, has in groups]
    ray.modules["ray._private.state"].state.get_cluster_config = lambda: SimpleNamespace(
        node_group_configs=kinds
    )
    placement = RayPlacement(RayWorkers(resources={"decoder": 1}))
    with pytest.raises(ValueError, match="decoder") if raises else nullcontext():
        placement.start(b"setup", 1)
    placement.close()
    assert not caplog.records


@pytest.mark.parametrize("status", ['{"autoscaler_report": {"node_type_mapping": {"f": "ray.head"}}}', "{}"])
def test_an_unknown_autoscaler_is_a_warning(ray: Ray, status: str, caplog: pytest.LogCaptureFixture) -> None:
    ray.autoscaler = status
    placement = RayPlacement(RayWorkers(resources={"decoder": 1}))
    placement.start(b"setup", 1)
    placement.close()
    [record] = caplog.records
    assert "no machine of the Ray cluster has 1 decoder (the most is 0)" in record.getMessage()


@pytest.mark.processes
def test_an_actor_needs_neither_this_package_nor_torch_before_it_opens_the_dataset() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    sent = base64.b64encode(cloudpickle.dumps(ray_placement._actor_class()))
    result = run_script(
        f"""
        import base64, pickle, sys
        pickle.loads(base64.b64decode({sent!r}))()
        print(sorted({{"fastq_loader", "torch", "ray"}} & set(sys.modules)))
        """
    )
    assert result[:3] == (0, "[]\n", "")
