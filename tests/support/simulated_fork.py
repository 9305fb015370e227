"""Forks without a process, for tests of what a child may see."""

from __future__ import annotations

import os

from fastq_loader.memory.forked_children import ForkedChildren


class Fork:
    """A fork that goes on, and then a child that lives, as the pipe sees them."""

    def __init__(self, watched: ForkedChildren) -> None:
        self._watched = watched
        self._child = watched.forking()
        self._held = [os.dup(end) for end in self._child.write]  # what the child inherits
        self.under_way = self.alive = True

    def finish(self) -> None:
        if self.under_way:
            self.under_way = False
            self._watched.forked(self._child)

    def die(self) -> None:
        if self.alive:
            self.finish()
            self.alive = False
            while self._held:
                os.close(self._held.pop())
