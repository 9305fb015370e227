"""What is known of a pool's actors in a Ray cluster, and what is to be done about it.

Pure: events in, instructions out; `ray_placement` carries them out. An actor holds room for one worker on
some machine, and one of a machine's actors, the starter, runs the host there. Whoever wants a place gets
that of an actor whose machine answers and has a host that listens. A machine that is in doubt gives no place
until it has answered again; one that does not is written off. As many actors are there as places are wanted,
and no more than this pool may have: for one that is gone another one is made, and waits until some machine
has room.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

#: Actors made one after the other that may fail, before any host listens again, until no more are made.
TRIES = 3
#: Ticks after which a machine that was asked whether it is there is done without, and until it is said that
#: workers wait for room.
SILENT, ROOMLESS = 5, 30


@dataclass(frozen=True)
class Create:
    """Make an actor, and ask it where it is."""

    actor: int


@dataclass(frozen=True)
class Ask:
    """Ask an actor again where it is."""

    actor: int


@dataclass(frozen=True)
class StartHost:
    """Let an actor start a host, or say where the one listens that it has started."""

    actor: int


@dataclass(frozen=True)
class Kill:
    """End an actor that is of no use."""

    actor: int


@dataclass(frozen=True)
class Give:
    """A place is found.

    Attributes:
        number: of the place.
        actor: that holds the room for it.
        address, port: where the host listens.
        node: what the machine is called, for people.
    """

    number: int
    actor: int
    address: str
    port: int
    node: str


@dataclass(frozen=True)
class Lose:
    """A place is gone, or cannot be found at all. It still has to be released."""

    number: int
    why: str


@dataclass(frozen=True)
class Complain:
    """The epoch has waited for room for long: tell the user.

    Attributes:
        have: workers that have a place.
        want: workers that there are.
    """

    have: int
    want: int


Instruction = Create | Ask | StartHost | Kill | Give | Lose | Complain


@dataclass
class _Machine:
    """A machine with actors on it.

    Attributes:
        address: of Ray there.
        node: Ray's name for it.
        actors: those that are there.
        starter: the actor that runs its host, or None.
        port: where the host listens; None as long as that is not known.
        in_doubt: it was asked whether it is there, and has not answered.
        silent: ticks since then.
    """

    address: str
    node: str
    actors: set[int] = field(default_factory=set)
    starter: int | None = None
    port: int | None = None
    in_doubt: bool = False
    silent: int = 0


class Cluster:
    """The actors of one pool.

    Args:
        flexible: few workers do the work of many; else all are needed.

    Attributes:
        most: actors that this pool may have.
    """

    def __init__(self, flexible: bool = True) -> None:
        self._flexible = flexible
        self.most = sys.maxsize
        self._roomless = 0  # ticks in which the epoch waited for room
        self._made = 0
        self._home: dict[int, _Machine | None] = {}  # actor → where it is; None: it waits for room
        self._machines: dict[str, _Machine] = {}
        self._held: dict[int, int] = {}  # actor → number of the place that was given
        self._wanted: deque[int] = deque()  # numbers of places that are to be found
        self._failures = 0
        self._why = ""  # of the last one
        self._counted = 0  # actors from this one on were made after the last failure that was counted

    @property
    def hopeless(self) -> bool:
        """Whether no more actors are made, because the last ones failed."""
        return self._failures >= TRIES

    # ---- places are wanted, and are not any more -------------------------------------------------

    def acquire(self, number: int) -> list[Instruction]:
        """A place is wanted."""
        self._wanted.append(number)
        return self._serve()

    def release(self, number: int, why: str) -> list[Instruction]:
        """A place is not wanted any more. With a reason its machine is in doubt."""
        if number in self._wanted:
            self._wanted.remove(number)
        actor = next((actor for actor, held in self._held.items() if held == number), None)
        if actor is None:
            return []
        del self._held[actor]
        machine = self._home[actor]
        if not why or machine is None or machine.port is None:
            return self._serve()
        return [*self._doubt(machine, machine.starter), *self._serve()]

    # ---- what actors say ------------------------------------------------------------------------

    def placed(self, actor: int, node: str, address: str) -> list[Instruction]:
        """An actor says where it is, at first or when it was asked again."""
        if actor not in self._home:
            return []
        machine = self._machines.setdefault(node, _Machine(address, f"{address} (Ray's node {node[:12]})"))
        self._home[actor] = machine
        machine.actors.add(actor)
        answered, machine.in_doubt = machine.in_doubt, False
        if machine.starter is None:
            machine.starter = actor
        elif not answered:
            return self._serve()
        starter = machine.starter
        return [StartHost(starter)]

    def listens(self, actor: int, port: int) -> list[Instruction]:
        """The host that an actor runs listens, or still does."""
        machine = self._home.get(actor)
        if machine is None:
            return []
        self._failures = 0
        machine.port = port
        return self._serve()

    # ---- what fails -----------------------------------------------------------------------------

    def unsure(self, actor: int) -> list[Instruction]:
        """Ray does not reach an actor, which proves nothing."""
        machine = self._home.get(actor)
        return [] if machine is None else self._doubt(machine, actor)

    def failed(self, actor: int, why: str) -> list[Instruction]:
        """An actor could not be made, or could not start a host."""
        if actor not in self._home:
            return []
        self._count(actor)
        self._why = why
        return self.lost(actor, why)

    def over(self, why: str) -> list[Instruction]:
        """All actors are gone, and none can be made any more."""
        self._failures, self._why = TRIES, why
        return [instruction for actor in list(self._home) for instruction in self.gone(actor, why)]

    def tick(self) -> list[Instruction]:
        """A second has passed. Machines in doubt that had time enough to answer are done without."""
        found: list[Instruction] = []
        for machine in self._machines.values():
            machine.silent = machine.silent + 1 if machine.in_doubt else 0
        for actor, home in list(self._home.items()):
            if home is not None and home.silent >= SILENT:
                found += self.lost(actor, "its machine does not answer")
        waits = self._wanted and not (self._flexible and self._held)
        self._roomless = self._roomless + 1 if waits else 0
        if self._roomless == ROOMLESS:
            found.append(Complain(len(self._held), len(self._held) + len(self._wanted)))
        return found

    def lost(self, actor: int, why: str) -> list[Instruction]:
        """An actor did not answer when it was asked where it is."""
        return [Kill(actor), *self.gone(actor, why)] if actor in self._home else []

    def gone(self, actor: int, why: str) -> list[Instruction]:
        """An actor has ended. It is no failure if it was never up: Ray places actors on a machine that has
        died, until it knows."""
        if actor not in self._home:
            return []
        machine = self._home.pop(actor)
        found: list[Instruction] = []
        if actor in self._held:
            found.append(Lose(self._held.pop(actor), why))
        if machine is not None:
            found += self._leave(machine, actor)
        return found + self._serve()

    def _count(self, actor: int) -> None:
        """An actor has failed. Those that were made together fail together, once."""
        if actor >= self._counted:
            self._failures += 1
            self._counted = self._made

    def _leave(self, machine: _Machine, actor: int) -> list[Instruction]:
        """An actor is not on its machine any more."""
        machine.actors.discard(actor)
        if not machine.actors:
            self._machines = {node: one for node, one in self._machines.items() if one is not machine}
        elif machine.starter == actor:  # the host has ended with it
            machine.starter, machine.port = min(machine.actors), None
            return [Ask(machine.starter)] if machine.in_doubt else [StartHost(machine.starter)]
        return []

    def _doubt(self, machine: _Machine, asked: int | None) -> list[Instruction]:
        """Give nothing of a machine until it has answered."""
        assert asked is not None, "a machine whose host listened has a starter"
        machine.silent = machine.silent if machine.in_doubt else 0
        machine.in_doubt, machine.port = True, None
        return [Ask(asked)]

    # ---- what can be given ----------------------------------------------------------------------

    def _open(self, machine: _Machine | None) -> bool:
        return machine is not None and machine.port is not None and not machine.in_doubt

    def _serve(self) -> list[Instruction]:
        """Give what there is, and make actors for what there is not, as far as this pool may have them."""
        found: list[Instruction] = []
        free = [actor for actor, machine in self._home.items() if self._open(machine)]
        for actor in [actor for actor in free if actor not in self._held][: len(self._wanted)]:
            machine = self._home[actor]
            assert machine is not None
            assert machine.port is not None, "only such machines are open"
            number = self._held[actor] = self._wanted.popleft()
            found.append(Give(number, actor, machine.address, machine.port, machine.node))
        if self.hopeless:
            if not any(map(self._open, self._machines.values())):
                found += [Lose(number, self._why) for number in self._wanted]
                self._wanted.clear()
        else:
            while len(self._home) < min(len(self._held) + len(self._wanted), self.most):
                self._home[self._made] = None
                found.append(Create(self._made))
                self._made += 1
        return found
