"""What was handed out of an epoch, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.scheduling.progress import START, Progress, WorkerProgress


@given(st.permutations(range(12)), st.integers(0, 12))
def test_every_position_counts_once_in_whatever_order_they_come(order: list[int], come: int) -> None:
    progress = START
    for position in order[:come]:
        progress = progress.after(position)
    handed_out = set(order[:come])
    head = next(position for position in range(13) if position not in handed_out)
    assert progress.delivered == come
    assert progress.head == head
    assert progress.beyond == {position for position in handed_out if position > head}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((b"", b"a", b"b"))), max_size=10))
def test_each_worker_is_counted_and_its_last_word_kept(batches: list[tuple[int, bytes]]) -> None:
    progress = Progress(workers=(WorkerProgress(),) * 3)
    for worker, state in batches:
        progress = progress.after_worker(worker, state, None)
    assert progress.delivered == len(batches)
    for number, worker in enumerate(progress.workers):
        said = [state for at, state in batches if at == number]
        assert worker.delivered == len(said)
        assert worker.state == next((state for state in reversed(said) if state), b"")


def test_a_worker_of_a_dataset_with_indices_moves_both_counts() -> None:
    progress = Progress(workers=(WorkerProgress(),) * 2).after_worker(1, b"x", 1)
    assert progress == Progress(1, frozenset({1}), (WorkerProgress(), WorkerProgress(1, b"x")))
