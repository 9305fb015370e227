"""A block: its sizes, and the only ways back to a free one."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastq_loader.memory.blocks import (
    BLOCK_TRANSITIONS,
    DEVICE_ALIGNMENT,
    FILLED,
    FREE,
    GRANTED,
    HELD,
    PAGE,
    SMALLEST,
    device_aligned,
    size_class,
)

SIZES = st.one_of(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 44),
    st.builds(lambda power, off: max((1 << power) + off, 0), st.integers(10, 44), st.integers(-2, 2)),
)


@settings(deadline=None, max_examples=200)
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


def test_there_are_four_size_classes_between_powers_of_two() -> None:
    for power in range(17, 30):
        step = (1 << power) // 64
        sizes = {size_class(nbytes) for nbytes in range((1 << power) + 1, (2 << power) + 1, step)}
        assert sizes == {(1 << power) * quarters // 4 for quarters in (5, 6, 7, 8)}


def test_only_these_events_free_a_block() -> None:
    freeing = {(s, e) for s, events in BLOCK_TRANSITIONS.items() for e, to in events.items() if to == FREE}
    assert freeing == {(GRANTED, "return"), (GRANTED, "writer_dead"), (FILLED, "drop"), (HELD, "release")}
