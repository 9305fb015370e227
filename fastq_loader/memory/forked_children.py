"""Tracks processes forked by user code, which keep shared memory visible until they exit.

Runs in the consumer and in workers, on whatever thread forks. A child continues to see the shared memory that
existed at the fork, with its current contents. So blocks that were referenced then are not reused until the
child has ended or runs another program. Each `ForkedChildren` has an owner: the arena, for blocks that the
user references, or a worker's allocator, for blocks of a batch under construction.

The child holds one end of a pipe, which closes when it and its own children are gone. Where descriptors are
used up there is no pipe: the child's end cannot be detected, and it counts as alive as long as its owner is
in use.

Points in time are moments: numbers that increase from call to call, on all threads. A fork takes more than
one moment, because other threads continue between its hooks: the child may see blocks that were made before
the fork ended.

The hooks raise nothing: Python would print the error, and fork without running the rest of the hook.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref

from fastq_loader.system import calls

#: Returns a larger number at each call, in one step: no other thread can interfere.
tick = itertools.count(1).__next__

_NEVER = sys.maxsize


class _Child:
    """A forked child and its own children; none if the fork has failed.

    Args:
        watched: whether its end is to be detected.

    Attributes:
        began, ended: moments before and after the fork.
        read, write: the ends of its pipe, each in a list, from which only one thread can take the descriptor.
    """

    __slots__ = ("began", "ended", "read", "write")

    def __init__(self, watched: bool) -> None:
        self.began = tick()
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
    """The children that may see the blocks of one owner.

    Attributes:
        owned: number of blocks that the owner has now; a fork while it is 0 is ignored. The owner counts a
            block before it takes the moment of the block's birth.
        alive: children that are not known to be gone.
    """

    def __init__(self) -> None:
        self.owned = 0
        self.alive: list[_Child] = []
        self._closed = False
        _registry[id(self)] = self

    def may_see(self, born: int, died: int) -> bool:
        """Whether a child that was alive at the last `reap` may see a block that existed between two moments.
        Makes no system call, and may be called on any thread."""
        if not self.alive:
            return False
        return any(born < child.ended and died > child.began for child in tuple(self.alive))

    def reap(self) -> None:
        """Remove the children that have ended, with their own children, or run another program."""
        for child in tuple(self.alive):
            if child.ended < _NEVER and child.read and calls.readable(child.read, 0):
                self._forget(child)

    def close(self) -> None:
        """Close the owner's descriptors. From here on every child counts as alive, also those forked
        later."""
        self._closed = True
        for child in tuple(self.alive):
            _close(child.read)

    def _forget(self, child: _Child) -> None:
        with contextlib.suppress(ValueError):  # another thread has removed it
            self.alive.remove(child)
        _close(child.read)

    # ---- the hooks ----------------------------------------------------------------------------

    def forking(self) -> _Child:
        self.reap()  # else every fork would cost a descriptor while no block is released
        child = _Child(watched=not self._closed)
        self.alive.append(child)
        return child

    def forked(self, child: _Child) -> None:
        child.ended = tick()
        _close(child.write)  # only the child itself holds it now
        if not self.owned:
            self._forget(child)
        elif self._closed:  # the latest child sees all that earlier ones see
            self.alive[:] = [other for other in self.alive if other.ended >= child.ended]

    def inherited(self, mine: list[_Child]) -> None:
        """Close the pipes in a forked child, where the owner is the parent's."""
        for child in self.alive:
            _close(child.read)
            if child not in mine or not self.owned:
                _close(child.write)


#: By id. Its references can be listed in one step, while other threads create and drop owners.
_registry: weakref.WeakValueDictionary[int, ForkedChildren] = weakref.WeakValueDictionary()


class _Forks(threading.local):
    """The forks in progress on this thread; a hook of the user's may fork, too."""

    def __init__(self) -> None:
        self.begun: list[list[tuple[ForkedChildren, _Child]]] = []


_forks = _Forks()


def _living() -> list[ForkedChildren]:
    return [children for reference in _registry.valuerefs() if (children := reference()) is not None]


def _before_fork() -> None:
    begun: list[tuple[ForkedChildren, _Child]] = []
    _forks.begun.append(begun)
    for children in _living():
        begun.append((children, children.forking()))  # noqa: PERF401 - if interrupted, these have begun


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
