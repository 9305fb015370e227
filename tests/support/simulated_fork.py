"""Forks without a process, for tests of what a child may see."""

from __future__ import annotations

import os

from fastq_loader.memory import forked_children


class Fork:
    """A fork in progress, and then a child that lives, as the pipe shows it."""

    def __init__(self, finish: bool = True) -> None:
        forked_children._before_fork()
        child = forked_children.living[-1]
        self._held = [os.dup(child.write)] if child.write >= 0 else []  # what the child inherits
        if finish:
            self.finish()

    def finish(self) -> None:
        forked_children._after_fork_in_parent()

    def die(self) -> None:
        while self._held:
            os.close(self._held.pop())
