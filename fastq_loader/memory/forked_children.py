"""Tracks processes forked by user code, which keep shared memory visible until they exit.

Runs in the consumer and in workers, on whatever thread forks. A child continues to see the shared memory that
existed at the fork, with its current contents. So a block that was referenced then is not reused until the
child and its own children have ended, or run another program: a pipe, of which they hold one end, shows that.
Where descriptors are used up there is no pipe, and the child counts as alive for ever.

A *moment* is the number of forks so far. A child may see each block that was referenced at a moment before
that of its fork.

The hooks raise nothing: Python would print the error, and fork without running the rest of the hook.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from typing import Any

from fastq_loader.system import calls

_next = itertools.count(1).__next__  # in one step, whatever thread forks
#: The present moment.
now = 0
#: By id, the arenas and allocators of this process; they say whether they have `leased` blocks. The children
#: that are forked while none has are not tracked.
owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Child:
    """A forked child.

    Attributes:
        thread: the thread that forks it.
        number: number of the fork; larger than any other one while the fork is in progress.
        read, write: the ends of its pipe; -1 without a pipe.
    """

    def __init__(self) -> None:
        self.thread, self.number = threading.get_ident(), sys.maxsize
        self.read = self.write = -1
        with contextlib.suppress(OSError):  # descriptors are used up
            self.read, self.write = os.pipe()


#: The children that have not been seen to end.
living: list[_Child] = []


def seen_before() -> int:
    """Return a moment: a living child may see each block that was referenced before it, even if only for a
    time. May be called on any thread."""
    if not living:
        return 0
    _remove_ended()
    return max([child.number for child in living[:]], default=0)


def _remove_ended() -> None:
    """Remove the children that have ended, with their own children, or run another program."""
    for child in living[:]:
        if child.read >= 0 and calls.readable([child.read], 0):
            _remove(child)


def _remove(child: _Child) -> None:
    with contextlib.suppress(ValueError):  # another thread has removed it
        living.remove(child)
        if child.read >= 0:
            os.close(child.read)


def _before_fork() -> None:
    _remove_ended()  # else every fork would cost a descriptor while no block is released
    if owners:
        living.append(_Child())


def _after_fork_in_parent() -> None:
    global now
    for child in reversed(living):  # a hook of the user's may fork, too
        if child.thread == threading.get_ident() and child.number == sys.maxsize:
            child.number = now = _next()
            if child.write >= 0:
                os.close(child.write)  # only the child itself holds it now
            known = [reference() for reference in owners.valuerefs()]  # in one step, whatever threads add
            if not any(owner is not None and owner.leased for owner in known):
                _remove(child)
            return


def _after_fork_in_child() -> None:
    for child in living:  # the ends for writing stay open
        if child.read >= 0:
            os.close(child.read)
    living.clear()
    owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
