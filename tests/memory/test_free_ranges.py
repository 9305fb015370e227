"""The ranges in which a worker can make blocks, against a set of bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.memory.free_ranges import FreeRanges


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 20)), max_size=40))
def test_the_address_space_gives_each_byte_once(steps: list[tuple[bool, int, int]]) -> None:
    space = FreeRanges(((10, 60), (70, 40)))  # neighbours: they merge when one is given back
    taken: list[tuple[int, int]] = []
    free = {*range(10, 110)}
    for take, size, which in steps:
        if take:
            offset = space.take(size)
            fitting = [byte for byte in sorted(free) if free >= {*range(byte, byte + size)}]
            if offset is None:
                assert not [byte for byte in fitting if not byte < 70 < byte + size], "there was room"
            else:
                assert free >= {*range(offset, offset + size)}
                taken.append((offset, size))
                free -= {*range(offset, offset + size)}
        elif taken:
            offset, size = taken.pop(which % len(taken))
            space.give(offset, size)
            free |= {*range(offset, offset + size)}


def test_the_first_range_with_room_is_cut_and_ranges_merge_again() -> None:
    space = FreeRanges(((10, 30), (50, 60)))
    assert [space.take(size) for size in (40, 20, 20, 5, 10)] == [50, 10, 90, 30, None]
    for offset, size in ((50, 40), (90, 20), (30, 5), (10, 20)):
        space.give(offset, size)
    assert [space.take(size) for size in (61, 60, 31, 30, 1)] == [None, 50, None, 10, None]
