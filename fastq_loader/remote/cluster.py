"""What is known of a pool's actors in a Ray cluster, and what is to be done about it.

Pure: `ray_placement` says what happens, and does what it is told. An actor holds room for one worker on
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
from typing import Protocol

#: Actors made one after the other that may fail, before any host listens again, until no more are made.
TRIES = 3
#: Ticks after which a machine that was asked whether it is there is done without, and until it is said that
#: workers wait for room.
SILENT, ROOMLESS = 5, 30


class Instructions(Protocol):
    """What is to be done. Whoever does it tells the cluster of the outcome later, and not in here."""

    def create(self, actor: int) -> None:
        """Make an actor, and ask it where it is."""

    def ask(self, actor: int) -> None:
        """Ask an actor again where it is."""

    def start_host(self, actor: int) -> None:
        """Let an actor start a host, or say where the one listens that it has started."""

    def kill(self, actor: int) -> None:
        """End an actor that is of no use."""

    def give(self, number: int, actor: int, address: str, port: int, node: str) -> None:
        """A place is found.

        Args:
            number: of the place.
            actor: that holds the room for it.
            address, port: where the host listens.
            node: what the machine is called, for people.
        """

    def lose(self, number: int, why: str) -> None:
        """A place is gone, or cannot be found at all. It still has to be released."""

    def complain(self, have: int, want: int) -> None:
        """The epoch has waited for room for long: tell the user.

        Args:
            have: workers that have a place.
            want: workers that there are.
        """


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
        do: carries out what is to be done.
        flexible: few workers do the work of many; else all are needed.

    Attributes:
        most: actors that this pool may have.
    """

    def __init__(self, do: Instructions, flexible: bool = True) -> None:
        self._do = do
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

    def acquire(self, number: int) -> None:
        """A place is wanted."""
        self._wanted.append(number)
        self._serve()

    def release(self, number: int, why: str) -> None:
        """A place is not wanted any more. With a reason its machine is in doubt."""
        if number in self._wanted:
            self._wanted.remove(number)
        actor = next((actor for actor, held in self._held.items() if held == number), None)
        if actor is None:
            return
        del self._held[actor]
        machine = self._home[actor]
        if why and machine is not None and machine.port is not None:
            self._doubt(machine, machine.starter)
        self._serve()

    # ---- what actors say ------------------------------------------------------------------------

    def placed(self, actor: int, node: str, address: str) -> None:
        """An actor says where it is, at first or when it was asked again."""
        if actor not in self._home:
            return
        machine = self._machines.setdefault(node, _Machine(address, f"{address} (Ray's node {node[:12]})"))
        self._home[actor] = machine
        machine.actors.add(actor)
        answered, machine.in_doubt = machine.in_doubt, False
        if machine.starter is None:
            machine.starter = actor
        elif not answered:
            self._serve()
            return
        self._do.start_host(machine.starter)

    def listens(self, actor: int, port: int) -> None:
        """The host that an actor runs listens, or still does."""
        machine = self._home.get(actor)
        if machine is not None:
            self._failures = 0
            machine.port = port
            self._serve()

    # ---- what fails -----------------------------------------------------------------------------

    def unsure(self, actor: int) -> None:
        """Ray does not reach an actor, which proves nothing."""
        machine = self._home.get(actor)
        if machine is not None:
            self._doubt(machine, actor)

    def failed(self, actor: int, why: str) -> None:
        """An actor could not be made, or could not start a host."""
        if actor not in self._home:
            return
        if actor >= self._counted:  # those that were made together fail together, once
            self._failures += 1
            self._counted = self._made
        self._why = why
        self.lost(actor, why)

    def over(self, why: str) -> None:
        """All actors are gone, and none can be made any more."""
        self._failures, self._why = TRIES, why
        for actor in list(self._home):
            self.gone(actor, why)

    def tick(self) -> None:
        """A second has passed. Machines in doubt that had time enough to answer are done without."""
        for machine in self._machines.values():
            machine.silent = machine.silent + 1 if machine.in_doubt else 0
        for actor, home in list(self._home.items()):
            if home is not None and home.silent >= SILENT:
                self.lost(actor, "its machine does not answer")
        waits = self._wanted and not (self._flexible and self._held)
        self._roomless = self._roomless + 1 if waits else 0
        if self._roomless == ROOMLESS:
            self._do.complain(len(self._held), len(self._held) + len(self._wanted))

    def lost(self, actor: int, why: str) -> None:
        """An actor did not answer when it was asked where it is."""
        if actor in self._home:
            self._do.kill(actor)
            self.gone(actor, why)

    def gone(self, actor: int, why: str) -> None:
        """An actor has ended. It is no failure if it was never up: Ray places actors on a machine that has
        died, until it knows."""
        if actor not in self._home:
            return
        machine = self._home.pop(actor)
        if actor in self._held:
            self._do.lose(self._held.pop(actor), why)
        if machine is not None:
            self._leave(machine, actor)
        self._serve()

    def _leave(self, machine: _Machine, actor: int) -> None:
        """An actor is not on its machine any more."""
        machine.actors.discard(actor)
        if not machine.actors:
            self._machines = {node: one for node, one in self._machines.items() if one is not machine}
        elif machine.starter == actor:  # the host has ended with it
            machine.starter, machine.port = min(machine.actors), None
            (self._do.ask if machine.in_doubt else self._do.start_host)(machine.starter)

    def _doubt(self, machine: _Machine, asked: int | None) -> None:
        """Give nothing of a machine until it has answered."""
        assert asked is not None, "a machine whose host listened has a starter"
        machine.silent = machine.silent if machine.in_doubt else 0
        machine.in_doubt, machine.port = True, None
        self._do.ask(asked)

    # ---- what can be given ----------------------------------------------------------------------

    def _open(self, machine: _Machine | None) -> bool:
        return machine is not None and machine.port is not None and not machine.in_doubt

    def _serve(self) -> None:
        """Give what there is, and make actors for what there is not, as far as this pool may have them."""
        free = [actor for actor, machine in self._home.items() if self._open(machine)]
        for actor in [actor for actor in free if actor not in self._held][: len(self._wanted)]:
            machine = self._home[actor]
            assert machine is not None
            assert machine.port is not None, "only such machines are open"
            number = self._held[actor] = self._wanted.popleft()
            self._do.give(number, actor, machine.address, machine.port, machine.node)
        if self.hopeless:
            if not any(map(self._open, self._machines.values())):
                while self._wanted:
                    self._do.lose(self._wanted.popleft(), self._why)
        else:
            while len(self._home) < min(len(self._held) + len(self._wanted), self.most):
                self._home[self._made] = None
                self._made += 1
                self._do.create(self._made - 1)
