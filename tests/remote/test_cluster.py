"""What is done about the actors of a pool, whatever Ray says of them, and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastq_loader.remote.cluster import (
    ROOMLESS,
    SILENT,
    TRIES,
    Ask,
    Cluster,
    Complain,
    Create,
    Give,
    Instruction,
    Kill,
    Lose,
    StartHost,
)

MACHINES = ["aaaa", "bbbb", "cccc"]


def in_doubt(cluster: Cluster) -> bool:
    """Whether a machine was asked whether it is there, and has not answered yet."""
    return any(machine.in_doubt for machine in cluster._machines.values())


def found(instructions: list[Instruction], kind: type) -> list[Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def ticks(cluster: Cluster, number: int) -> list[Instruction]:
    return [instruction for _ in range(number) for instruction in cluster.tick()]


def up(cluster: Cluster, places: dict[int, str]) -> None:
    """Actors on machines, by number; each machine's host listens at port 7."""
    for number in range(len(places)):
        cluster.acquire(number)
    for actor, node in places.items():
        for instruction in cluster.placed(actor, node, f"10.0.0.{node}"):
            if isinstance(instruction, StartHost):
                cluster.listens(instruction.actor, 7)


def test_a_place_is_given_when_its_host_listens() -> None:
    cluster = Cluster()
    assert cluster.acquire(1) == [Create(0)]
    assert cluster.acquire(2) == [Create(1)]
    assert cluster.placed(1, "f" * 56, "10.0.0.9") == [StartHost(1)]
    assert cluster.placed(0, "f" * 56, "10.0.0.9") == []
    node = "10.0.0.9 (Ray's node ffffffffffff)"
    assert cluster.listens(1, 4711) == [
        Give(1, 0, "10.0.0.9", 4711, node),
        Give(2, 1, "10.0.0.9", 4711, node),
    ]


def test_one_host_serves_all_places_of_a_machine() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "b"})
    assert cluster.acquire(5) == [Create(2)]
    assert found(cluster.placed(2, "b", "10.0.0.b"), Give)


def test_a_place_that_was_not_lost_is_given_again_at_once() -> None:
    cluster = Cluster()
    up(cluster, {0: "a"})
    assert cluster.release(0, "") == []
    assert found(cluster.acquire(1), Give) == [Give(1, 0, "10.0.0.a", 7, "10.0.0.a (Ray's node a)")]


def test_a_machine_that_lost_a_worker_gives_no_place_before_it_has_answered() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "a"})
    assert cluster.release(1, "the connection broke") == [Ask(0)]
    assert in_doubt(cluster)
    assert cluster.acquire(2) == []
    assert cluster.placed(0, "a", "10.0.0.a") == [StartHost(0)]
    assert not in_doubt(cluster)
    assert not found(cluster.acquire(3), Give), "its host may listen elsewhere now"
    assert found(cluster.listens(0, 8), Give) == [Give(2, 1, "10.0.0.a", 8, "10.0.0.a (Ray's node a)")]


def test_another_machine_serves_meanwhile() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "b"})
    cluster.release(1, "")
    cluster.release(0, "the connection broke")
    assert [give.actor for give in found(cluster.acquire(2), Give)] == [1]  # type: ignore[union-attr]


def test_a_machine_that_does_not_answer_is_written_off() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "a", 2: "b"})
    cluster.release(0, "the connection broke")
    cluster.acquire(3)
    assert not ticks(cluster, SILENT - 1)
    instructions = cluster.tick()
    assert set(found(instructions, Kill)) == {Kill(0), Kill(1)}
    assert found(instructions, Lose) == [Lose(1, "its machine does not answer")]
    assert found(instructions, Create) == [Create(3)]
    assert not in_doubt(cluster)
    assert cluster.placed(0, "a", "10.0.0.a") == [], "it was ended"


def test_an_actor_that_ray_does_not_reach_is_asked_again_and_then_given_up() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "a"})
    assert cluster.unsure(1) == [Ask(1)]
    assert cluster.placed(1, "a", "10.0.0.a") == [StartHost(0)]
    assert cluster.unsure(1) == [Ask(1)]
    assert cluster.lost(1, "unavailable") == [Kill(1), Lose(1, "unavailable")]
    assert cluster.unsure(1) == cluster.lost(1, "again") == cluster.gone(1, "again") == []


def test_another_actor_starts_the_host_where_the_starter_is_gone() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "a"})
    assert cluster.gone(0, "killed") == [Lose(0, "killed"), StartHost(1)]
    assert cluster.listens(0, 9) == []
    assert cluster.acquire(2) == [Create(2)]
    assert cluster.placed(2, "a", "10.0.0.a") == []
    assert len(found(cluster.listens(1, 9), Give)) == 1


def test_a_host_that_is_being_started_may_take_its_time() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "a"})
    cluster.gone(0, "killed")
    assert cluster.release(1, "the connection broke, because the host ended") == []
    assert not in_doubt(cluster)


def test_an_answer_from_before_the_doubt_does_not_end_it() -> None:
    cluster = Cluster()
    cluster.acquire(0)
    assert cluster.placed(0, "a", "10.0.0.a") == [StartHost(0)]
    assert cluster.unsure(0) == [Ask(0)]
    assert cluster.listens(0, 7) == []
    assert cluster.placed(0, "a", "10.0.0.a") == [StartHost(0)]
    assert found(cluster.listens(0, 7), Give)


def test_a_machine_in_doubt_whose_starter_is_gone_is_asked_again() -> None:
    cluster = Cluster()
    up(cluster, {0: "a", 1: "a"})
    cluster.unsure(0)
    assert cluster.gone(0, "killed") == [Lose(0, "killed"), Ask(1)]
    assert cluster.placed(1, "a", "10.0.0.a") == [StartHost(1)]


def test_actors_that_die_before_they_are_up_are_made_again() -> None:
    cluster = Cluster()
    cluster.acquire(0)
    for actor in range(2 * TRIES):
        assert cluster.gone(actor, "its node has died") == [Create(actor + 1)]


def test_where_nothing_starts_it_is_said_and_no_more_is_tried() -> None:
    cluster = Cluster()
    cluster.acquire(0)
    for actor in range(TRIES - 1):
        cluster.placed(actor, "a", "10.0.0.a")
        assert found(cluster.failed(actor, "no torch there"), Create) == [Create(actor + 1)]
    cluster.placed(TRIES - 1, "a", "10.0.0.a")
    assert cluster.failed(TRIES - 1, "no torch there") == [Kill(TRIES - 1), Lose(0, "no torch there")]
    assert cluster.acquire(1) == [Lose(1, "no torch there")]


def test_a_host_that_listened_makes_up_for_failures() -> None:
    cluster = Cluster()
    for turn in range(TRIES):
        cluster.acquire(turn)
        assert found(cluster.failed(2 * turn, "no torch there"), Create) == [Create(2 * turn + 1)]
        cluster.placed(2 * turn + 1, f"{turn}", "10.0.0.1")
        cluster.listens(2 * turn + 1, 7)
    assert not cluster.hopeless


def test_machines_that_die_are_no_failures() -> None:
    cluster = Cluster()
    up(cluster, dict(enumerate("abcde")))
    for number in range(5):
        cluster.release(number, "the connection broke")
        ticks(cluster, SILENT)
        assert found(cluster.acquire(5 + number), Create)


def test_actors_that_fail_together_fail_once() -> None:
    cluster = Cluster()
    for number in range(2 * TRIES):
        cluster.acquire(number)
    made = [instruction for actor in range(2 * TRIES) for instruction in cluster.failed(actor, "no torch")]
    assert len(found(made, Create)) == 2 * TRIES
    assert not found(made, Lose)


def test_a_machine_that_works_is_waited_for_where_others_fail() -> None:
    cluster = Cluster()
    up(cluster, {0: "a"})
    cluster.acquire(1)
    for actor in range(1, TRIES + 1):
        cluster.placed(actor, "b", "10.0.0.b")
        assert not found(cluster.failed(actor, "no torch there"), Lose)
    assert [give.number for give in found(cluster.release(0, ""), Give)] == [1]  # type: ignore[union-attr]


# ---- room ------------------------------------------------------------------------------------------


def test_no_more_actors_are_made_than_the_pool_may_have() -> None:
    cluster = Cluster()
    cluster.most = 2
    assert [cluster.acquire(number) for number in range(3)] == [[Create(0)], [Create(1)], []]
    assert cluster.gone(0, "its node has died") == [Create(2)]


@pytest.mark.parametrize(("flexible", "held"), [(True, 0), (False, 0), (False, 1)])
def test_an_epoch_that_waits_for_room_says_so_once(flexible: bool, held: int) -> None:
    cluster = Cluster(flexible)
    up(cluster, dict.fromkeys(range(held), "a"))
    cluster.acquire(held)
    assert not ticks(cluster, ROOMLESS - 1)
    assert ticks(cluster, ROOMLESS) == [Complain(held, held + 1)]
    cluster.placed(held, "a", "10.0.0.a")
    cluster.listens(held, 7)
    assert not ticks(cluster, 2 * ROOMLESS)


def test_an_epoch_that_goes_on_with_fewer_workers_says_nothing() -> None:
    cluster = Cluster()
    up(cluster, {0: "a"})
    cluster.acquire(1)
    assert not ticks(cluster, 2 * ROOMLESS)


class Ray(RuleBasedStateMachine):
    """Any answers, in any order; and in the end everything works."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.number = 0
        self.wanted: set[int] = set()
        self.given: dict[int, int] = {}  # number → actor
        self.lost: set[int] = set()
        self.alive: set[int] = set()
        self.node: dict[int, str] = {}
        self.calls: list[Ask | Create | StartHost] = []
        self.cluster.most = 4
        self.doubted: set[str] = set()  # machines that have not answered since

    def do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Give):
                number, actor = instruction.number, instruction.actor
                assert number in self.wanted
                assert actor in self.alive
                assert actor not in self.given.values()
                assert self.node[actor] not in self.doubted
                self.wanted.discard(number)
                self.given[number] = actor
            elif isinstance(instruction, Lose):
                assert instruction.number in self.wanted or instruction.number in self.given
                self.wanted.discard(instruction.number)
                self.given.pop(instruction.number, None)
                self.lost.add(instruction.number)
            elif isinstance(instruction, Kill):
                self.alive.discard(instruction.actor)
            elif isinstance(instruction, Complain):
                assert self.wanted
                assert not self.given
            else:
                if isinstance(instruction, Create):
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

    def answer(self, call: Ask | Create | StartHost, node: str) -> None:
        self.calls.remove(call)
        if isinstance(call, StartHost):
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
        fails = self.cluster.lost if isinstance(call, Ask) else self.cluster.failed
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
        self.cluster.most = 100
        self.do(self.cluster._serve())
        while self.calls:
            self.answer(self.calls[0], MACHINES[0])
        assert self.cluster.hopeless or not self.wanted
        assert not in_doubt(self.cluster)


TestRay = Ray.TestCase


@pytest.mark.parametrize("actor", [0, 99])
def test_what_is_said_of_strangers_is_not_heard(actor: int) -> None:
    cluster = Cluster()
    assert cluster.placed(actor, "a", "10.0.0.1") == cluster.listens(actor, 7) == cluster.unsure(actor) == []
    assert cluster.failed(actor, "x") == cluster.gone(actor, "x") == cluster.release(actor, "x") == []
