"""The children that user code forks, and until when they may look at what was there.

Runs in the consumer and in workers, on whatever thread forks. A child goes on seeing the shared memory that
was there at the fork, as it is now. So what somebody looked at then stays out of use until the child has
ended, or runs another program. `Onlookers` says so to its owner: the arena, for what the user looks at, or a
worker's allocator, for what a batch is being written to.

The child holds one end of a pipe, which closes when it and its own children are gone. Where descriptors are
used up there is no pipe: nobody knows when it ends, and it counts as alive as long as its owner is in use.

When something happened is told by moments: numbers that grow from call to call, on all threads. A fork is not
one moment, because other threads go on between its hooks: what was made before it ended may be seen.

The hooks raise nothing: an error in one would be printed, and the fork would go on without the rest of it.
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
    """What one fork has made, if it has not failed.

    Args:
        watched: whether its end is to be noticed.

    Attributes:
        began, ended: moments before and after the fork.
    """

    __slots__ = ("_read", "_write", "began", "ended")

    def __init__(self, watched: bool) -> None:
        self.began = moment()
        self.ended = _NEVER
        # In lists, out of which one thread takes a descriptor once.
        self._read: list[int] = []
        self._write: list[int] = []
        if watched:
            with contextlib.suppress(OSError):  # they are used up
                read, write = os.pipe()
                self._read.append(read)
                self._write.append(write)

    def saw(self, born: int, died: int) -> bool:
        return born < self.ended and died > self.began

    def gone(self) -> bool:
        """Whether it is known to have ended, with its own children, or to run another program."""
        return self.ended < _NEVER and bool(self._read and calls.readable(self._read, 0))

    def forget_its_end(self) -> None:
        """Nobody will ask any more whether it is gone."""
        _close(self._read)

    def let_go(self) -> None:
        """Only the child itself holds the other end."""
        _close(self._write)


def _close(descriptors: list[int]) -> None:
    with contextlib.suppress(IndexError):
        os.close(descriptors.pop())


class Onlookers:
    """The children that may look at what their owner has.

    Attributes:
        count: things that its owner has now; while it is 0 a fork is none of its business. The owner counts a
            thing before it asks for the moment of its birth.
    """

    def __init__(self) -> None:
        self.count = 0
        self._children: list[_Child] = []
        self._closed = False
        _registry[id(self)] = self

    def saw(self, born: int, died: int) -> bool:
        """Whether a child that was alive when `reap` was called last may look at what was there from one
        moment to another. Makes no system call, and may be called on any thread."""
        if not self._children:
            return False
        return any(child.saw(born, died) for child in tuple(self._children))

    def reap(self) -> None:
        """Forget the children that are gone."""
        for child in tuple(self._children):
            if child.gone():
                self._forget(child)

    def close(self) -> None:
        """The owner's descriptors are given back. From here on every child counts as alive, those that are
        forked later too."""
        self._closed = True
        for child in tuple(self._children):
            child.forget_its_end()

    def _forget(self, child: _Child) -> None:
        with contextlib.suppress(ValueError):  # another thread has done it
            self._children.remove(child)
        child.forget_its_end()

    # ---- the hooks ----------------------------------------------------------------------------

    def forking(self) -> _Child:
        self.reap()  # else every fork would cost a descriptor while nothing is let go
        child = _Child(watched=not self._closed)
        self._children.append(child)
        return child

    def forked(self, child: _Child) -> None:
        child.ended = moment()
        child.let_go()
        if not self.count:
            self._forget(child)
        elif self._closed:  # the latest saw all that those before it saw
            self._children[:] = [other for other in self._children if other.ended >= child.ended]

    def inherited(self, mine: list[_Child]) -> None:
        """This process is a child itself, and the owner is its parent's."""
        for child in self._children:
            child.forget_its_end()
            if child not in mine or not self.count:
                child.let_go()


#: By id. Its references are listed in one step, while other threads make owners and drop them.
_registry: weakref.WeakValueDictionary[int, Onlookers] = weakref.WeakValueDictionary()


class _Forks(threading.local):
    """The forks that this thread is in the middle of: a hook of the user's may fork, too."""

    def __init__(self) -> None:
        self.begun: list[list[tuple[Onlookers, _Child]]] = []


_forks = _Forks()


def _living() -> list[Onlookers]:
    found = [reference() for reference in _registry.valuerefs()]
    return [onlookers for onlookers in found if onlookers is not None]


def _before_fork() -> None:
    begun: list[tuple[Onlookers, _Child]] = []
    _forks.begun.append(begun)
    for onlookers in _living():
        begun.append((onlookers, onlookers.forking()))  # noqa: PERF401 - whatever comes between, these have begun


def _after_fork_in_parent() -> None:
    for onlookers, child in _forks.begun.pop() if _forks.begun else ():
        onlookers.forked(child)


def _after_fork_in_child() -> None:
    global _registry
    mine = [child for _, child in _forks.begun.pop()] if _forks.begun else []
    for onlookers in _living():
        onlookers.inherited(mine)
    _registry = weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
