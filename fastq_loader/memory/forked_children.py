"""The children that user code forks, and until when they may see what was in shared memory.

Runs in the consumer and in workers, on whatever thread forks. A child goes on seeing the shared memory that
was there at the fork, as it is now. So whatever was referenced then stays out of use until the child has
ended or runs another program. `ForkedChildren` tells its owner: the arena, for what the user references,
and a worker's allocator, for what a batch is being written to.

The child holds one end of a pipe, which closes when it and its own children are gone. Where descriptors are
used up there is no pipe: the end of the child is unknown, and it counts as alive as long as its owner is in
use.

Points in time are moments: numbers that grow from call to call, on all threads. A fork takes more than one
moment, because other threads go on between its hooks: the child may see what was made before the fork ended.

The hooks raise nothing: Python would print the error, and the fork would go on without the rest of the hook.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref

from fastq_loader.system import calls

#: A number larger than all that were given before. It is one step: no other thread comes between.
moment = itertools.count(1).__next__

_NEVER = sys.maxsize


class _Child:
    """Children of one fork, if it has not failed.

    Args:
        watched: whether its end is to be noticed.

    Attributes:
        began, ended: moments before and after the fork.
        read, write: the ends of its pipe, in lists, out of which only one thread can take a descriptor.
    """

    __slots__ = ("began", "ended", "read", "write")

    def __init__(self, watched: bool) -> None:
        self.began = moment()
        self.ended = _NEVER
        self.read: list[int] = []
        self.write: list[int] = []
        if watched:
            with contextlib.suppress(OSError):  # descriptors are used up
                self.read, self.write = ([end] for end in os.pipe())


def _close(descriptors: list[int]) -> None:
    with contextlib.suppress(IndexError):  # it is closed already
        os.close(descriptors.pop())


class ForkedChildren:
    """The children that may see what their owner has.

    Attributes:
        owned: number of things that the owner has now; a fork while it is 0 does not count. The owner counts
            a thing before it asks for the moment of its birth.
        alive: those that are not known to be gone.
    """

    def __init__(self) -> None:
        self.owned = 0
        self.alive: list[_Child] = []
        self._closed = False
        _registry[id(self)] = self

    def may_see(self, born: int, died: int) -> bool:
        """Whether a child that was alive at the last `reap` may see what was there between two moments. Makes
        no system call, and may be called on any thread."""
        if not self.alive:
            return False
        return any(born < child.ended and died > child.began for child in tuple(self.alive))

    def reap(self) -> None:
        """Forget the children that have ended, with their own children, or run another program."""
        for child in tuple(self.alive):
            if child.ended < _NEVER and child.read and calls.readable(child.read, 0):
                self._forget(child)

    def close(self) -> None:
        """The owner's descriptors are given back. From here on every child counts as alive, those that are
        forked later too."""
        self._closed = True
        for child in tuple(self.alive):
            _close(child.read)

    def _forget(self, child: _Child) -> None:
        with contextlib.suppress(ValueError):  # another thread has done it
            self.alive.remove(child)
        _close(child.read)

    # ---- the hooks ----------------------------------------------------------------------------

    def forking(self) -> _Child:
        self.reap()  # else every fork would cost a descriptor while no block is released
        child = _Child(watched=not self._closed)
        self.alive.append(child)
        return child

    def forked(self, child: _Child) -> None:
        child.ended = moment()
        _close(child.write)  # only the child itself holds it now
        if not self.owned:
            self._forget(child)
        elif self._closed:  # the latest child saw all that those before it saw
            self.alive[:] = [other for other in self.alive if other.ended >= child.ended]

    def inherited(self, mine: list[_Child]) -> None:
        """This process is a child itself, and the owner is its parent's."""
        for child in self.alive:
            _close(child.read)
            if child not in mine or not self.owned:
                _close(child.write)


#: By id. Its references are listed in one step, while other threads make owners and drop them.
_registry: weakref.WeakValueDictionary[int, ForkedChildren] = weakref.WeakValueDictionary()


class _Forks(threading.local):
    """The forks that this thread is in the middle of: a hook of the user's may fork, too."""

    def __init__(self) -> None:
        self.begun: list[list[tuple[ForkedChildren, _Child]]] = []


_forks = _Forks()


def _living() -> list[ForkedChildren]:
    return [children for reference in _registry.valuerefs() if (children := reference()) is not None]


def _before_fork() -> None:
    begun: list[tuple[ForkedChildren, _Child]] = []
    _forks.begun.append(begun)
    for children in _living():
        begun.append((children, children.forking()))  # noqa: PERF401 - whatever interrupts it, these have begun


def _after_fork_in_parent() -> None:
    for children, child in _forks.begun.pop() if _forks.begun else ():
        children.forked(child)


def _after_fork_in_child() -> None:
    global _registry
    mine = [child for _, child in _forks.begun.pop()] if _forks.begun else []
    for children in _living():
        children.inherited(mine)
    _registry = weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
