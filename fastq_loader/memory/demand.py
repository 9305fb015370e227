"""What batches need: which blocks the next task should get, and since when a block has been of no use.

Pure: it counts tasks and sizes. Batches of a few kinds may take turns, and nobody knows the kind of the next
one. So a task gets enough for any of them, and gives back what it does not use; else their blocks would be
made anew all the time. A kind that has not come for many tasks is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Tasks after which a block that none of them used goes back to the system. Making 200 MB of pages anew takes
#: as long as a thousand of the smallest batches.
PATIENCE = 1000
#: Tasks after which a kind of batch that has not come is not expected any more: tasks are not granted blocks
#: for it, and blocks that only it needs go back to the system.
EXPECTED = 125
#: Kinds of batches that are told apart. Where there are more, their sizes are so many that blocks of one kind
#: serve another.
KINDS = 4


class Demand:
    """The needs of the recent batches.

    Attributes:
        tasks: that there have been.
        wanted: bytes of the blocks that serve every recent kind of batch, each by itself; descending.
        wanted_bytes: their sum.
        batch_bytes: of a batch's blocks: a maximum that fades over some hundred batches.
    """

    def __init__(self) -> None:
        self.tasks = 0
        self.wanted: tuple[int, ...] = ()
        self.wanted_bytes = 0
        self.batch_bytes = 0.0
        self._kinds: dict[tuple[int, ...], int] = {}  # bytes of a batch's blocks → its task; newest last
        self._next_check = EXPECTED
        self._newest: Sequence[int] = ()  # sizes of the newest batch, and what they come to
        self._kind: tuple[int, ...] = ()
        self._bytes = 0.0

    def learn(self, sizes: Sequence[int]) -> None:
        """A batch used blocks of these sizes. The same object is the same kind, for as long as it comes."""
        if sizes is not self._newest:
            self._newest, self._kind = sizes, tuple(sorted(sizes, reverse=True))
            self._bytes = float(sum(sizes))
        kind = self._kind
        known = self._kinds.pop(kind, None) is not None
        self._kinds[kind] = self.tasks
        if not known:
            if len(self._kinds) > KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._want()
        self.batch_bytes = max(self._bytes, 0.99 * self.batch_bytes)

    def _want(self) -> None:
        wanted: list[int] = []
        for kind in sorted(self._kinds, reverse=True):
            left = list(wanted)
            for size in kind:
                fitting = [other for other in left if size <= other <= 2 * size]
                if fitting:
                    left.remove(fitting[-1])
                else:
                    wanted.append(size)
            wanted.sort(reverse=True)
        self.wanted = tuple(wanted)
        self.wanted_bytes = sum(wanted)

    def cold(self) -> int | None:
        """Now and then the task since which blocks should have been used; None: not yet.

        Kinds of batches that have not come of late are forgotten.
        """
        if self.tasks < self._next_check:
            return None
        self._next_check = self.tasks + EXPECTED // 8
        lasting = {kind: task for kind, task in self._kinds.items() if task >= self.tasks - EXPECTED}
        if len(lasting) < len(self._kinds):
            self._kinds = lasting
            self._want()
            if not lasting:
                self.batch_bytes = 0.0
        return self.tasks - PATIENCE
