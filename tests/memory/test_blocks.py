"""A block: its sizes, the only ways back to a free one, and the ranges that new ones are made in."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from fastq_loader.memory.blocks import (
    DEVICE_ALIGNMENT,
    PAGE,
    SMALLEST,
    FreeRanges,
    device_aligned,
    size_class,
)
from tests.support.thorough import examples

SIZES = st.one_of(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 44),
    st.builds(lambda power, off: max((1 << power) + off, 0), st.integers(10, 44), st.integers(-2, 2)),
)


@examples(200)
@given(SIZES, SIZES)
@example(SMALLEST, SMALLEST + 1)
def test_a_size_class_fits_and_wastes_little(smaller: int, larger: int) -> None:
    smaller, larger = sorted((smaller, larger))
    size = size_class(larger)
    assert size >= max(larger, SMALLEST, size_class(smaller))
    assert size % PAGE == 0
    assert size_class(size) == size
    assert 4 * size <= 5 * max(larger, SMALLEST)
    assert device_aligned(larger) % DEVICE_ALIGNMENT == 0
    assert 0 <= device_aligned(larger) - larger < DEVICE_ALIGNMENT


@examples(100)
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
            space.free_ranges(((offset, size),))
            free |= {*range(offset, offset + size)}
