"""What is asked of Ray, and what becomes of its answers. Ray is played here, and real in `end_to_end`."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader import RayWorkers
from fastq_loader.remote import ray_placement
from fastq_loader.remote.control import NoPlace, Place
from fastq_loader.remote.link import Address
from fastq_loader.remote.ray_placement import RayPlacement
from tests.conftest import wait_until

SECONDS = 10  # against hanging


class ActorDiedError(Exception):
    actor_init_failed = False


class ActorUnavailableError(Exception):
    pass


#: What was found, by the numbers of places.
FOUND: dict[int, list[Place | NoPlace]] = {}
#: Calls whose answers were heard.
HEARD: set[Future[Any]] = set()


class Method:
    """A method of an actor: its calls, which the test answers."""

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []
        self.given: list[Any] = []

    def remote(self, *given: Any) -> Any:
        self.given.append(given)
        self.calls.append(Future())
        return self.calls[-1]

    def answer(self, result: Any) -> None:
        assert wait_until(lambda: any(not call.done() for call in self.calls), SECONDS)
        call = next(call for call in self.calls if not call.done())
        if isinstance(result, Exception):
            call.set_exception(result)
        else:
            call.set_result(result)
        assert wait_until(lambda: call in HEARD, SECONDS)


class Actor:
    def __init__(self) -> None:
        self.where, self.listen, self.stay, self.end = Method(), Method(), Method(), Method()


class Ray:
    """As much of Ray as is used."""

    exceptions = SimpleNamespace(ActorDiedError=ActorDiedError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self) -> None:
        self.running = False
        self.lock = threading.RLock()  # that Ray takes for its start and its end
        self.driver = "this process"
        self.joined: list[Any] = []
        self.options: dict[str, Any] = {}
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.waited: list[int] = []
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
        return SimpleNamespace(get_worker_id=lambda: self.driver, gcs_address="10.0.0.1:6379")

    def kill(self, actor: Actor) -> None:
        self._must_run()
        self.killed.append(actor)

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self._must_run()
        if timeout:
            self.waited.append(num_returns)
        done = [reference for reference in references if reference.done()]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: Future[Any]) -> Any:
        self._must_run()
        HEARD.add(reference)
        return reference.result()

    def actor(self, number: int) -> Actor:
        assert wait_until(lambda: len(self.actors) > number, SECONDS)
        return self.actors[number]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    played = Ray()
    played.modules = {
        "ray": played,
        "ray._private.worker": SimpleNamespace(_connect_or_shutdown_lock=played.lock),
        "ray._private.state": SimpleNamespace(state=SimpleNamespace(get_cluster_config=lambda: None)),
        "ray.experimental.internal_kv": SimpleNamespace(_internal_kv_get=lambda key: played.status),
    }
    monkeypatch.setattr(importlib, "import_module", lambda name: played.modules[name])
    monkeypatch.setattr(ray_placement, "_TICK", 1000)
    return played


@pytest.fixture
def placement(ray: Ray) -> Iterator[RayPlacement]:
    placement = RayPlacement(RayWorkers(ports=(5, 6)))
    placement.start(b"spec", note)
    yield placement
    placement.close()


def note(found: Place | NoPlace) -> None:
    FOUND[found.number].append(found)


def acquire(placement: RayPlacement, number: int) -> list[Place | NoPlace]:
    FOUND[number] = []
    placement.acquire(number)
    return FOUND[number]


def test_ray_that_runs_is_used_and_else_it_is_joined(ray: Ray) -> None:
    for expected in ([None], [None]):
        placement = RayPlacement(RayWorkers())
        placement.start(b"spec", note)
        placement.close()
        assert ray.joined == expected
    ray.running = False
    placement = RayPlacement(RayWorkers(address="auto"))
    placement.start(b"spec", note)
    placement.close()
    assert ray.joined == [None, "auto"]
    RayPlacement(RayWorkers()).close()  # it was not started


def test_actors_are_made_as_the_user_said(ray: Ray, placement: RayPlacement) -> None:
    assert ray.options == {
        "num_cpus": 1,
        "num_gpus": 0,
        "resources": {},
        "scheduling_strategy": "SPREAD",
        "runtime_env": None,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 4,
    }


def test_a_place_is_found_once_an_actor_has_room_and_its_host_listens(
    ray: Ray, placement: RayPlacement
) -> None:
    found = acquire(placement, 3)
    actor = ray.actor(0)
    actor.where.answer(("f" * 56, "10.0.0.7", {"CUDA_VISIBLE_DEVICES": "1"}))
    actor.listen.answer(4711)
    assert wait_until(lambda: bool(found), SECONDS)
    assert found == [
        Place(
            3, Address("10.0.0.7", 4711), "10.0.0.7 (Ray's node ffffffffffff)", {"CUDA_VISIBLE_DEVICES": "1"}
        )
    ]
    assert actor.listen.given == [(b"spec", [5, 6])]
    assert placement.death(3) == ""
    placement.close()
    assert ray.waited == [1], "its host has ended"
    assert ray.killed == [actor]


def test_an_actor_that_dies_takes_its_place_along(ray: Ray, placement: RayPlacement) -> None:
    found = acquire(placement, 3)
    actor = ray.actor(0)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    text = "The actor died.\n\tclass_name: Seat\nThe actor is dead because x. Some common causes include: (1)"
    actor.stay.answer(ActorDiedError(text))
    assert wait_until(lambda: len(found) == 2, SECONDS)
    assert found[1] == NoPlace(3, "The actor is dead because x")
    assert placement.death(3) == "The actor is dead because x"
    placement.close()
    assert not ray.killed


def test_a_machine_that_answers_goes_on(ray: Ray, placement: RayPlacement) -> None:
    acquire(placement, 3)
    actor = ray.actor(0)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    placement.release(3, "the worker was killed")
    found = acquire(placement, 4)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    assert wait_until(lambda: bool(found), SECONDS)
    assert len(actor.stay.calls) == 1, "its end is noticed once"


def test_an_actor_that_is_not_reached_is_asked_and_watched_again(ray: Ray, placement: RayPlacement) -> None:
    found = acquire(placement, 3)
    actor = ray.actor(0)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    actor.stay.answer(ActorUnavailableError("for now"))
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    assert wait_until(lambda: len(actor.stay.calls) == 2, SECONDS)
    assert len(found) == 1
    assert len(ray.actors) == 1
    actor.stay.answer(ActorUnavailableError("again"))
    actor.where.answer(ActorUnavailableError("and again"))
    assert wait_until(lambda: len(found) == 2, SECONDS)
    assert ray.killed == [actor]


def test_a_place_that_was_given_back_is_not_spoken_of(ray: Ray, placement: RayPlacement) -> None:
    found = acquire(placement, 3)
    actor = ray.actor(0)
    placement.release(3, "")
    other = acquire(placement, 4)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    assert wait_until(lambda: bool(other), SECONDS)
    assert not found


def test_where_no_host_starts_whoever_waits_hears_why(ray: Ray, placement: RayPlacement) -> None:
    found = acquire(placement, 3)
    for number in range(3):
        actor = ray.actor(number)
        actor.where.answer(("f", "10.0.0.7", {}))
        actor.listen.answer(OSError("Traceback\nOSError: no torch there"))
    assert wait_until(lambda: bool(found), SECONDS)
    assert found == [NoPlace(3, "OSError: no torch there")]


def test_an_actor_that_cannot_be_made_is_a_failure(ray: Ray, placement: RayPlacement) -> None:
    found = acquire(placement, 3)
    error = ActorDiedError("The actor died because of an error raised in its creation task, so there")
    error.actor_init_failed = True
    for number in range(3):
        ray.actor(number).where.answer(error)
    assert wait_until(lambda: bool(found), SECONDS)
    assert found == [NoPlace(3, str(error))]


def test_a_machine_that_keeps_silent_is_done_without(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "_TICK", 0.01)
    placement = RayPlacement(RayWorkers(num_cpus=0))
    placement.start(b"spec", note)
    acquire(placement, 3)
    actor = ray.actor(0)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    placement.release(3, "the connection broke")
    acquire(placement, 4)
    assert ray.actor(1)
    placement.close()
    assert actor in ray.killed


@pytest.mark.parametrize("again", [False, True], ids=["shut down", "and started again"])
def test_where_ray_was_shut_down_whoever_has_or_wants_a_place_hears_it(
    ray: Ray, placement: RayPlacement, again: bool
) -> None:
    found = acquire(placement, 3)
    actor = ray.actor(0)
    actor.where.answer(("f", "10.0.0.7", {}))
    actor.listen.answer(4711)
    assert wait_until(lambda: bool(found), SECONDS)
    waits = acquire(placement, 4)
    ray.actor(1)
    with ray.lock:
        ray.running, ray.driver = again, "another one"
    assert wait_until(lambda: len(found) == 2 and bool(waits), SECONDS)
    assert [found[1], *waits] == [NoPlace(number, "Ray was shut down") for number in (3, 4)]
    late = acquire(placement, 5)
    assert wait_until(lambda: late == [NoPlace(5, "Ray was shut down")], SECONDS)
    assert len(ray.actors) == 2
    placement.close()
    assert not ray.killed


def test_while_ray_starts_or_ends_it_is_not_touched_and_the_thread_may_still_end(
    ray: Ray, placement: RayPlacement
) -> None:
    with ray.lock:
        acquire(placement, 3)
        assert not wait_until(lambda: bool(ray.actors), 0.1)
        placement._stop()
    assert not ray.actors


def test_a_close_after_ray_was_shut_down_does_not_start_it(ray: Ray, placement: RayPlacement) -> None:
    found = acquire(placement, 3)
    ray.actor(0).where.answer(("f", "10.0.0.7", {}))
    ray.actor(0).listen.answer(4711)
    assert wait_until(lambda: bool(found), SECONDS)
    ray.running = False
    placement.close()
    assert not ray.waited


def test_at_the_exit_of_the_process_ray_is_called_no_more(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[Any] = []
    played = SimpleNamespace(
        register=exits.append, unregister=lambda one: exits.remove(one) if one in exits else None
    )
    monkeypatch.setattr(ray_placement, "atexit", played)
    placement = RayPlacement(RayWorkers())
    placement.start(b"spec", note)
    exits[0]()
    acquire(placement, 3)
    placement.close()
    assert not ray.actors
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
    placement = RayPlacement(RayWorkers(**given), flexible)
    placement.start(b"spec", note)
    for number in range(5):
        acquire(placement, number)
    placement.close()
    assert len(ray.actors) == actors


def test_ranks_are_those_of_torch_distributed_where_it_is_initialised(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_what_no_machine_could_ever_give_is_an_error_at_the_start(
    ray: Ray, given: dict[str, Any], lacks: str
) -> None:
    placement = RayPlacement(RayWorkers(**given))
    with pytest.raises(ValueError, match=lacks):
        placement.start(b"spec", note)
    placement.close()
    assert not ray.actors


@pytest.mark.parametrize(("handler", "ended"), [(None, [0]), (signal.SIG_DFL, [0]), (print, [])])
def test_at_the_exit_the_alarm_that_would_abort_it_is_ended(
    monkeypatch: pytest.MonkeyPatch, handler: Any, ended: list[int]
) -> None:
    alarms: list[int] = []
    played = {"getsignal": lambda number: handler, "alarm": alarms.append}
    monkeypatch.setattr(ray_placement, "signal", SimpleNamespace(**{**vars(signal), **played}))
    ray_placement._disarm()
    assert alarms == ended


def test_where_a_machine_fits_nobody_waits_to_hear_of_others(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_placement, "_addable", None)
    placement = RayPlacement(RayWorkers(num_cpus=8))
    placement.start(b"spec", note)
    placement.close()


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
        placement.start(b"spec", note)
    placement.close()
    assert not caplog.records


@pytest.mark.parametrize("status", ['{"autoscaler_report": {"node_type_mapping": {"f": "ray.head"}}}', "{}"])
def test_where_ray_does_not_say_what_could_be_added_it_is_a_warning(
    ray: Ray, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    ray.status = status
    placement = RayPlacement(RayWorkers(resources={"decoder": 1}))
    placement.start(b"spec", note)
    placement.close()
    [record] = caplog.records
    assert "no machine of the Ray cluster has 1 decoder (the most is 0)" in record.getMessage()


def test_who_waits_for_room_for_long_is_told_what_there_is(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_placement, "_TICK", 0.01)
    ray.available_resources = lambda: {"CPU": 1.0}  # type: ignore[attr-defined]
    placement = RayPlacement(RayWorkers(num_cpus=2))
    placement.start(b"spec", note)
    acquire(placement, 1)
    assert wait_until(lambda: bool(caplog.records), SECONDS)
    placement.close()
    [record] = caplog.records
    assert "0 of 1 workers have room in the Ray cluster at 10.0.0.1:6379" in record.getMessage()
    assert "Each takes 2 CPU (1 of 8 are free)" in record.getMessage()
