"""The shared-memory blocks of one pool of workers: which are free, granted for writing, or referenced.

Pure, except for calls of the arena: it counts offsets and sizes. Runs in the consumer, on the thread that
calls `next()`. The table in `blocks` defines the life of a block: it is granted to a task, accepted with the
batch that a worker has written to it, and delivered to the user or dropped; `collect` processes leases that
have died. No block is written to while anything references it: from HELD only `release` leads on, and it
leads to FREE.

A worker makes new blocks on its own when no granted block fits, in its own part of the arena's address range.
The pool adopts them with the answer. So no worker ever waits for space.

The need for blocks is measured in tasks and sizes. Batches of a few kinds may take turns, and the kind of the
next one is unknown. So a task gets enough for any of them, and returns the rest; else their blocks would be
made anew all the time. A kind that has not occurred for many tasks is forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fastq_loader.errors import InvalidTransition, ProtocolError, Transitions
from fastq_loader.memory.blocks import (
    BLOCK_TRANSITIONS,
    FREE,
    GRANTED,
    HELD,
    Block,
    BlockOwner,
    Extents,
    size_class,
)

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Arena

_NEXT = Transitions("a block", BLOCK_TRANSITIONS)
#: Tasks after which an unused block goes back to the system. Making 200 MB of pages anew takes as long as a
#: thousand of the smallest batches.
PATIENCE = 1000
#: Tasks after which a kind of batch that has not occurred is not expected any more: tasks are not granted
#: blocks for it, and blocks that only it needs go back to the system.
EXPECTED = 125
#: Kinds of batches that are distinguished. If there are more, their sizes are so many that blocks of one kind
#: serve another.
KINDS = 4


class RecentUsage:
    """The needs of the recent batches.

    Attributes:
        tasks: number of tasks so far.
        wanted: bytes of the blocks that serve every recent kind of batch, each by itself; descending.
        batch_bytes: bytes of a batch's blocks: a maximum that decays over some hundred batches.
    """

    def __init__(self) -> None:
        self.tasks = 0
        self.wanted: tuple[int, ...] = ()
        self.batch_bytes = 0.0
        self._kinds: dict[tuple[int, ...], int] = {}  # bytes of a batch's blocks → its last task; newest last
        self._next_check = EXPECTED

    def learn(self, kind: tuple[int, ...]) -> None:
        """Record a batch that used blocks of these sizes, in descending order."""
        known = self._kinds.pop(kind, None) is not None
        self._kinds[kind] = self.tasks
        if not known:
            if len(self._kinds) > KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._want()
        self.batch_bytes = max(sum(kind), 0.99 * self.batch_bytes)

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

    def cold(self) -> int:
        """From time to time, return the number of the task since which a block must have been used to stay;
        else 0.

        Kinds of batches that have not occurred recently are forgotten.
        """
        if self.tasks < self._next_check:
            return 0
        self._next_check = self.tasks + EXPECTED // 8
        lasting = {kind: task for kind, task in self._kinds.items() if task >= self.tasks - EXPECTED}
        if len(lasting) < len(self._kinds):
            self._kinds = lasting
            self._want()
            if not lasting:
                self.batch_bytes = 0.0
        return self.tasks - PATIENCE


class BlockPool:
    """All blocks of one arena, by state.

    Args:
        arena: the memory. The pool gives it back in `close`.

    Attributes:
        grown: number of blocks adopted so far.
        block_at: returns the block at an offset, or None.
        nbytes: bytes of all blocks.
        free_blocks: number of free blocks.
        demand: the needs of the recent batches.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._blocks: dict[int, Block] = {}
        self.block_at = self._blocks.get
        self._free: dict[int, deque[int]] = {}  # size → offsets; last used at the right end
        self._sizes: list[int] = []  # sizes that have a free list, ascending
        self.grown = 0
        self.nbytes = 0
        self._held_bytes = 0
        self._kept_bytes = 0
        self.free_blocks = 0
        self._space: dict[int, list[tuple[int, int]]] = {}  # worker → ranges of its trimmed blocks
        self.demand = RecentUsage()
        self._needs: list[int] = []  # bytes of the newest batch in each block; `_kind` is its kind
        self._kind: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def batch_bytes(self) -> float:
        """Bytes of a batch's blocks: a maximum that decays over some hundred batches."""
        return self.demand.batch_bytes

    # ---- the life of a block ------------------------------------------------------------------

    def _move(self, offset: int, event: str) -> Block:
        block = self._blocks[offset]
        before, state = block.state, _NEXT[block.state, event]
        block.state = state
        if before == FREE:
            self.free_blocks -= 1
        elif before == HELD:
            self._held_bytes -= block.size
        elif block.kept:
            block.kept = False
            self._kept_bytes -= block.size
        if state == FREE:
            self._free[block.size].append(offset)
            self.free_blocks += 1
        elif state == HELD:
            self._held_bytes += block.size
        return block

    def grant(self, holder: BlockOwner) -> Extents:
        """Grant free blocks for a batch like the recent ones, if available."""
        demand = self.demand
        demand.tasks += 1
        if not demand.wanted:
            return ()
        grants: list[tuple[int, int]] = []
        for wanted in demand.wanted:
            free = self._free.get(wanted)
            block = self._move(free.pop(), "grant") if free else self._take(wanted)
            if block is not None:
                block.writer = holder
                grants.append((block.offset, block.size))
        return tuple(grants)

    def _take(self, wanted: int) -> Block | None:
        # A block up to twice as large will do. With sizes that vary, a higher limit would let small batches
        # hold large blocks.
        for size in self._sizes[bisect_left(self._sizes, wanted) : bisect_right(self._sizes, 2 * wanted)]:
            if self._free[size]:
                return self._move(self._free[size].pop(), "grant")
        return None

    def accept(
        self, worker: int, used: Extents, fresh: Extents, returned: tuple[int, ...], given: Extents
    ) -> None:
        """Accept the batch that a worker has written.

        Args:
            worker: its number.
            used: the batch's blocks (offset, bytes needed).
            fresh: blocks (offset, size) that the worker made.
            returned: offsets of granted blocks that it did not use.
            given: blocks that its task was granted. If the worker neither used nor returned one, user code
                references it there, and it stays.

        Raises:
            ProtocolError: a block does not belong to the worker; nothing was changed.
        """
        self._check_own(worker, used, fresh, returned)
        for offset, size in fresh:
            self._adopt(worker, offset, size)
        if returned:
            self.give_back(returned)
        for offset, _ in used:
            self._move(offset, "fill").last_task = self.demand.tasks
        for offset, size in given:
            block = self._blocks[offset]
            if block.state == GRANTED and not block.kept and block.writer == (worker, None):
                block.kept = True
                self._kept_bytes += size
        if used:
            needs = [need for _, need in used]
            if needs != self._needs:
                self._needs, self._kind = needs, tuple(sorted(map(size_class, needs), reverse=True))
            self.demand.learn(self._kind)

    def _check_own(self, worker: int, used: Extents, fresh: Extents, returned: tuple[int, ...]) -> None:
        named, made = [*[offset for offset, _ in used], *returned], {offset for offset, _ in fresh}
        if len({*named}) < len(named) or not made.isdisjoint(self._blocks):
            raise ProtocolError(f"worker {worker} names one block twice")
        for offset in named:
            if offset in made:
                continue
            block = self._blocks.get(offset)
            if block is None or block.writer != (worker, None):
                raise ProtocolError(f"worker {worker} has no grant for the block at {offset}")
            if block.state != GRANTED:
                raise ProtocolError(f"worker {worker} names the block at {offset}, which is {block.state}")

    def _adopt(self, worker: int, offset: int, size: int) -> None:
        block = self._blocks[offset] = Block(offset, size, worker)
        block.last_task = self.demand.tasks
        if size not in self._free:
            self._free[size] = deque()
            insort(self._sizes, size)
        self.grown += 1
        self.nbytes += size

    def deliver(self, offsets: Sequence[int]) -> None:
        """Hand out the batch in these blocks; its views hold leases."""
        for offset in offsets:
            self._move(offset, "deliver")

    def release(self, offsets: Iterable[int]) -> None:
        """Free blocks whose last views are gone."""
        for offset in offsets:
            self._move(offset, "release").last_task = self.demand.tasks

    def collect(self) -> None:
        """Free the blocks whose last view has died."""
        self.release(self.arena.released_blocks())

    def drop(self, offsets: Iterable[int]) -> None:
        """Free the blocks of a batch that is not handed out, or was copied out of them."""
        for offset in offsets:
            self._move(offset, "drop")

    def give_back(self, offsets: Iterable[int]) -> None:
        """Take back unused grants."""
        for offset in offsets:
            self._move(offset, "give_back")

    def hand_over(self, holder: BlockOwner, worker: int, blocks: Extents) -> None:
        """Transfer grants from `holder`, a ticket, to the `worker` that has claimed it."""
        for offset, _ in blocks:
            block = self._blocks[offset]
            if block.writer != holder or block.state != GRANTED:
                raise InvalidTransition(f"block {offset} is {block.state}, and not {holder}'s to hand over")
            block.writer = BlockOwner(worker)

    def mark_dead(self, worker: int) -> None:
        """Take back the grants of `worker`, which is confirmed dead."""
        for offset, block in self._blocks.items():
            if block.state == GRANTED and block.writer == (worker, None):
                self._move(offset, "give_back")

    # ---- shrinking ----------------------------------------------------------------------------

    def trim(self, batches: int, forget: Callable[[int], None] | None = None) -> bool:
        """Give the pages of unneeded blocks back to the system.

        Blocks still referenced by the user or the dataset are never trimmed. Of the others, as many stay as
        `batches` batches need, so that a loop that kept batches for a while returns their memory; blocks that
        were unused for many tasks go anyway. A trimmed block is no longer a block: its address range goes to
        the worker that made it, see `space`.

        Args:
            batches: number of batches for which blocks stay.
            forget: called with the offset of each block before its pages go: a device that has locked them
                must not read them any more.

        Returns:
            Whether there is new `space` to send to workers.
        """
        spare = self._take_spare(batches)
        for block in spare:
            if forget is not None:
                forget(block.offset)
            self.arena.mapping.punch(block.offset, block.size)
            self._space.setdefault(block.home, []).append((block.offset, block.size))
        return bool(spare)

    def _take_spare(self, batches: int) -> list[Block]:
        taken: list[Block] = []
        demand = self.demand
        since = demand.cold()
        for size in self._sizes if since > 0 else ():
            free = self._free[size]
            while free and self._blocks[free[0]].last_task < since:
                taken.append(self._take_coldest(size))
        needed = batches * max(demand.batch_bytes, sum(demand.wanted))
        spare = self.nbytes - self._held_bytes - self._kept_bytes - int(needed)
        for size in reversed(self._sizes) if spare > 0 else ():
            while self._free[size] and spare >= size:
                spare -= size
                taken.append(self._take_coldest(size))
        return taken

    def _take_coldest(self, size: int) -> Block:
        self.nbytes -= size
        self.free_blocks -= 1
        return self._blocks.pop(self._free[size].popleft())

    def space(self, worker: int) -> Extents:
        """Take the address ranges (offset, size) of trimmed blocks in which `worker` may make new blocks."""
        return tuple(self._space.pop(worker)) if worker in self._space else ()

    def clear_space(self, worker: int) -> Extents:
        """The ranges (offset, size) of a dead worker's part of the arena in which its successor may make
        blocks: everything outside of blocks. Pages that the dead worker wrote there go back to the system."""
        self._space.pop(worker, None)
        start, end = self.arena.mapping.region(worker)
        gaps = []
        for offset in sorted(offset for offset in self._blocks if start <= offset < end):
            gaps.append((start, offset - start))
            start = offset + self._blocks[offset].size
        space = tuple(gap for gap in [*gaps, (start, end - start)] if gap[1])
        for gap in space:
            self.arena.mapping.punch(*gap)
        return space

    def usage(self) -> tuple[int, int, int]:
        """Blocks in use, free blocks, and bytes of shared memory behind them. May be called on any thread."""
        free = self.free_blocks
        return len(self) - free, free, self.nbytes

    def close(self) -> None:
        """Give the memory back after all workers have ended, except blocks that users reference. May be
        called again after an interrupt."""
        if not self.arena.retired:
            self.collect()
        held = [block for block in self._blocks.values() if block.state == HELD]
        self.arena.retire([(block.offset, block.size) for block in held])
