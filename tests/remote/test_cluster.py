"""What is done about the actors of a pool, whatever Ray says of them, and in whatever order."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastq_loader.remote.cluster import ROOMLESS, SILENT, TRIES, Cluster, Instructions

MACHINES = ["aaaa", "bbbb", "cccc"]


class Said(NamedTuple):
    """An instruction, and what comes with it."""

    what: str
    given: tuple[Any, ...]

    @property
    def actor(self) -> int:
        """Of all instructions that have one."""
        return int(self.given[self.what == "give"])

    @property
    def number(self) -> int:
        """Of a place that is given or lost."""
        return int(self.given[0])


class Heard:
    """A cluster each of whose methods returns the instructions that it gave meanwhile."""

    def __init__(self, flexible: bool = True) -> None:
        self.said: list[Said] = []
        self.cluster = Cluster(self, flexible)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if hasattr(Instructions, name):
            return lambda *given: self.said.append(Said(name, given))
        found = getattr(self.cluster, name)
        if not callable(found):
            return found

        def call(*given: Any) -> list[Said]:
            found(*given)
            said, self.said = self.said, []
            return said

        return call


def create(actor: int) -> Said:
    return Said("create", (actor,))


def ask(actor: int) -> Said:
    return Said("ask", (actor,))


def start_host(actor: int) -> Said:
    return Said("start_host", (actor,))


def kill(actor: int) -> Said:
    return Said("kill", (actor,))


def give(*given: Any) -> Said:
    return Said("give", given)


def lose(*given: Any) -> Said:
    return Said("lose", given)


def in_doubt(cluster: Heard) -> bool:
    """Whether a machine was asked whether it is there, and has not answered yet."""
    return any(machine.in_doubt for machine in cluster._machines.values())


def found(instructions: list[Said], what: str) -> list[Said]:
    return [instruction for instruction in instructions if instruction.what == what]


def ticks(cluster: Heard, number: int) -> list[Said]:
    return [instruction for _ in range(number) for instruction in cluster.tick()]


def up(cluster: Heard, places: dict[int, str]) -> None:
    """Actors on machines, by number; each machine's host listens at port 7."""
    for number in range(len(places)):
        cluster.acquire(number)
    for actor, node in places.items():
        for instruction in cluster.placed(actor, node, f"10.0.0.{node}"):
            if instruction.what == "start_host":
                cluster.listens(instruction.actor, 7)


def test_a_place_is_given_when_its_host_listens() -> None:
    cluster = Heard()
    assert cluster.acquire(1) == [create(0)]
    assert cluster.acquire(2) == [create(1)]
    assert cluster.placed(1, "f" * 56, "10.0.0.9") == [start_host(1)]
    assert cluster.placed(0, "f" * 56, "10.0.0.9") == []
    node = "10.0.0.9 (Ray's node ffffffffffff)"
    assert cluster.listens(1, 4711) == [
        give(1, 0, "10.0.0.9", 4711, node),
        give(2, 1, "10.0.0.9", 4711, node),
    ]


def test_one_host_serves_all_places_of_a_machine() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "b"})
    assert cluster.acquire(5) == [create(2)]
    assert found(cluster.placed(2, "b", "10.0.0.b"), "give")


def test_a_place_that_was_not_lost_is_given_again_at_once() -> None:
    cluster = Heard()
    up(cluster, {0: "a"})
    assert cluster.release(0, "") == []
    assert found(cluster.acquire(1), "give") == [give(1, 0, "10.0.0.a", 7, "10.0.0.a (Ray's node a)")]


def test_a_machine_that_lost_a_worker_gives_no_place_before_it_has_answered() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "a"})
    assert cluster.release(1, "the connection broke") == [ask(0)]
    assert in_doubt(cluster)
    assert cluster.acquire(2) == []
    assert cluster.placed(0, "a", "10.0.0.a") == [start_host(0)]
    assert not in_doubt(cluster)
    assert not found(cluster.acquire(3), "give"), "its host may listen elsewhere now"
    assert found(cluster.listens(0, 8), "give") == [give(2, 1, "10.0.0.a", 8, "10.0.0.a (Ray's node a)")]


def test_another_machine_serves_meanwhile() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "b"})
    cluster.release(1, "")
    cluster.release(0, "the connection broke")
    assert [one.actor for one in found(cluster.acquire(2), "give")] == [1]


def test_a_machine_that_does_not_answer_is_written_off() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "a", 2: "b"})
    cluster.release(0, "the connection broke")
    cluster.acquire(3)
    assert not ticks(cluster, SILENT - 1)
    instructions = cluster.tick()
    assert set(found(instructions, "kill")) == {kill(0), kill(1)}
    assert found(instructions, "lose") == [lose(1, "its machine does not answer")]
    assert found(instructions, "create") == [create(3)]
    assert not in_doubt(cluster)
    assert cluster.placed(0, "a", "10.0.0.a") == [], "it was ended"


def test_an_actor_that_ray_does_not_reach_is_asked_again_and_then_given_up() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "a"})
    assert cluster.unsure(1) == [ask(1)]
    assert cluster.placed(1, "a", "10.0.0.a") == [start_host(0)]
    assert cluster.unsure(1) == [ask(1)]
    assert cluster.lost(1, "unavailable") == [kill(1), lose(1, "unavailable")]
    assert cluster.unsure(1) == cluster.lost(1, "again") == cluster.gone(1, "again") == []


def test_another_actor_starts_the_host_where_the_starter_is_gone() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "a"})
    assert cluster.gone(0, "killed") == [lose(0, "killed"), start_host(1)]
    assert cluster.listens(0, 9) == []
    assert cluster.acquire(2) == [create(2)]
    assert cluster.placed(2, "a", "10.0.0.a") == []
    assert len(found(cluster.listens(1, 9), "give")) == 1


def test_a_host_that_is_being_started_may_take_its_time() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "a"})
    cluster.gone(0, "killed")
    assert cluster.release(1, "the connection broke, because the host ended") == []
    assert not in_doubt(cluster)


def test_an_answer_from_before_the_doubt_does_not_end_it() -> None:
    cluster = Heard()
    cluster.acquire(0)
    assert cluster.placed(0, "a", "10.0.0.a") == [start_host(0)]
    assert cluster.unsure(0) == [ask(0)]
    assert cluster.listens(0, 7) == []
    assert cluster.placed(0, "a", "10.0.0.a") == [start_host(0)]
    assert found(cluster.listens(0, 7), "give")


def test_a_machine_in_doubt_whose_starter_is_gone_is_asked_again() -> None:
    cluster = Heard()
    up(cluster, {0: "a", 1: "a"})
    cluster.unsure(0)
    assert cluster.gone(0, "killed") == [lose(0, "killed"), ask(1)]
    assert cluster.placed(1, "a", "10.0.0.a") == [start_host(1)]


def test_actors_that_die_before_they_are_up_are_made_again() -> None:
    cluster = Heard()
    cluster.acquire(0)
    for actor in range(2 * TRIES):
        assert cluster.gone(actor, "its node has died") == [create(actor + 1)]


def test_where_nothing_starts_it_is_said_and_no_more_is_tried() -> None:
    cluster = Heard()
    cluster.acquire(0)
    for actor in range(TRIES - 1):
        cluster.placed(actor, "a", "10.0.0.a")
        assert found(cluster.failed(actor, "no torch there"), "create") == [create(actor + 1)]
    cluster.placed(TRIES - 1, "a", "10.0.0.a")
    assert cluster.failed(TRIES - 1, "no torch there") == [kill(TRIES - 1), lose(0, "no torch there")]
    assert cluster.acquire(1) == [lose(1, "no torch there")]


def test_a_host_that_listened_makes_up_for_failures() -> None:
    cluster = Heard()
    for turn in range(TRIES):
        cluster.acquire(turn)
        assert found(cluster.failed(2 * turn, "no torch there"), "create") == [create(2 * turn + 1)]
        cluster.placed(2 * turn + 1, f"{turn}", "10.0.0.1")
        cluster.listens(2 * turn + 1, 7)
    assert not cluster.hopeless


def test_machines_that_die_are_no_failures() -> None:
    cluster = Heard()
    up(cluster, dict(enumerate("abcde")))
    for number in range(5):
        cluster.release(number, "the connection broke")
        ticks(cluster, SILENT)
        assert found(cluster.acquire(5 + number), "create")


def test_actors_that_fail_together_fail_once() -> None:
    cluster = Heard()
    for number in range(2 * TRIES):
        cluster.acquire(number)
    made = [instruction for actor in range(2 * TRIES) for instruction in cluster.failed(actor, "no torch")]
    assert len(found(made, "create")) == 2 * TRIES
    assert not found(made, "lose")


def test_a_machine_that_works_is_waited_for_where_others_fail() -> None:
    cluster = Heard()
    up(cluster, {0: "a"})
    cluster.acquire(1)
    for actor in range(1, TRIES + 1):
        cluster.placed(actor, "b", "10.0.0.b")
        assert not found(cluster.failed(actor, "no torch there"), "lose")
    assert [one.number for one in found(cluster.release(0, ""), "give")] == [1]


# ---- room ------------------------------------------------------------------------------------------


def test_no_more_actors_are_made_than_the_pool_may_have() -> None:
    cluster = Heard()
    cluster.cluster.most = 2
    assert [cluster.acquire(number) for number in range(3)] == [[create(0)], [create(1)], []]
    assert cluster.gone(0, "its node has died") == [create(2)]


@pytest.mark.parametrize(("flexible", "held"), [(True, 0), (False, 0), (False, 1)])
def test_an_epoch_that_waits_for_room_says_so_once(flexible: bool, held: int) -> None:
    cluster = Heard(flexible)
    up(cluster, dict.fromkeys(range(held), "a"))
    cluster.acquire(held)
    assert not ticks(cluster, ROOMLESS - 1)
    assert ticks(cluster, ROOMLESS) == [Said("complain", (held, held + 1))]
    cluster.placed(held, "a", "10.0.0.a")
    cluster.listens(held, 7)
    assert not ticks(cluster, 2 * ROOMLESS)


def test_an_epoch_that_goes_on_with_fewer_workers_says_nothing() -> None:
    cluster = Heard()
    up(cluster, {0: "a"})
    cluster.acquire(1)
    assert not ticks(cluster, 2 * ROOMLESS)


class Ray(RuleBasedStateMachine):
    """Any answers, in any order; and in the end everything works."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Heard()
        self.number = 0
        self.wanted: set[int] = set()
        self.given: dict[int, int] = {}  # number → actor
        self.lost: set[int] = set()
        self.alive: set[int] = set()
        self.node: dict[int, str] = {}
        self.calls: list[Said] = []
        self.cluster.cluster.most = 4
        self.doubted: set[str] = set()  # machines that have not answered since

    def do(self, instructions: list[Said]) -> None:
        for instruction in instructions:
            if instruction.what == "give":
                number, actor = instruction.number, instruction.actor
                assert number in self.wanted
                assert actor in self.alive
                assert actor not in self.given.values()
                assert self.node[actor] not in self.doubted
                self.wanted.discard(number)
                self.given[number] = actor
            elif instruction.what == "lose":
                assert instruction.number in self.wanted or instruction.number in self.given
                self.wanted.discard(instruction.number)
                self.given.pop(instruction.number, None)
                self.lost.add(instruction.number)
            elif instruction.what == "kill":
                self.alive.discard(instruction.actor)
            elif instruction.what == "complain":
                assert self.wanted
                assert not self.given
            else:
                if instruction.what == "create":
                    self.alive.add(instruction.actor)
                self.calls.append(instruction)
        self.calls = [call for call in self.calls if call.actor in self.alive]

    @precondition(lambda self: len(self.wanted) + len(self.given) < 5)
    @rule()
    def acquire(self) -> None:
        self.wanted.add(self.number)
        self.number += 1
        self.do(self.cluster.acquire(self.number - 1))

    @precondition(lambda self: self.wanted or self.given or self.lost)
    @rule(data=st.data(), why=st.sampled_from(["", "the connection broke"]))
    def release(self, data: st.DataObject, why: str) -> None:
        number = data.draw(st.sampled_from(sorted({*self.wanted, *self.given, *self.lost})))
        actor = self.given.pop(number, None)
        self.wanted.discard(number)
        self.lost.discard(number)
        instructions = self.cluster.release(number, why)
        machine = None if actor is None else self.cluster._home.get(actor)
        if actor is not None and machine is not None and machine.in_doubt:  # else its host is being started
            self.doubted.add(self.node[actor])
        self.do(instructions)

    def answer(self, call: Said, node: str) -> None:
        self.calls.remove(call)
        if call.what == "start_host":
            self.do(self.cluster.listens(call.actor, 7))
            return
        node = self.node.setdefault(call.actor, node)
        self.doubted.discard(node)
        self.do(self.cluster.placed(call.actor, node, f"10.0.0.{node}"))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), node=st.sampled_from(MACHINES))
    def succeed(self, data: st.DataObject, node: str) -> None:
        self.answer(data.draw(st.sampled_from(self.calls)), node)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        fails = self.cluster.lost if call.what == "ask" else self.cluster.failed
        self.do(fails(call.actor, "it failed"))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), sure=st.booleans())
    def die(self, data: st.DataObject, sure: bool) -> None:
        actor = data.draw(st.sampled_from(sorted(self.alive)))
        if sure:
            self.alive.discard(actor)
            self.do(self.cluster.gone(actor, "it died"))
            return
        if actor in self.node:
            self.doubted.add(self.node[actor])
        self.do(self.cluster.unsure(actor))

    @rule()
    def fall_silent(self) -> None:
        self.do(ticks(self.cluster, SILENT))
        assert not in_doubt(self.cluster)

    @invariant()
    def there_is_an_actor_for_each_place(self) -> None:
        wanted = min(4, len(self.given) + len(self.wanted))
        assert self.cluster.hopeless or 4 >= len(self.alive) >= wanted

    def teardown(self) -> None:
        """Ray reaches everybody, and there is room: who waits gets a place."""
        self.cluster.cluster.most = 100
        self.do(self.cluster._serve())
        while self.calls:
            self.answer(self.calls[0], MACHINES[0])
        assert self.cluster.hopeless or not self.wanted
        assert not in_doubt(self.cluster)


TestRay = Ray.TestCase


@pytest.mark.parametrize("actor", [0, 99])
def test_what_is_said_of_strangers_is_not_heard(actor: int) -> None:
    cluster = Heard()
    assert cluster.placed(actor, "a", "10.0.0.1") == cluster.listens(actor, 7) == cluster.unsure(actor) == []
    assert cluster.failed(actor, "x") == cluster.gone(actor, "x") == cluster.release(actor, "x") == []
