"""What a process is: its id, also after a fork, and standard streams of which no descriptor is free."""

from __future__ import annotations

import os

import pytest

from fastq_loader.system import calls, process_id
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes


def test_the_id_is_the_systems_in_every_process_and_a_child_leaves_its_parents_loop() -> None:
    parent = process_id.current()
    assert parent == os.getpid()
    process_id.stay_in(parent)

    def check() -> None:
        assert process_id.current() == os.getpid() != parent
        with pytest.raises(SystemExit) as left:
            process_id.stay_in(parent)
        assert left.value.code == 0

    assert end_of(fork(check)) == 0


@pytest.mark.parametrize("free", [(0,), (0, 2), (0, 1, 2), ()])
def test_free_descriptors_lead_to_dev_null_and_others_are_left_alone(free: tuple[int, ...]) -> None:
    before = [os.stat(descriptor).st_ino for descriptor in range(3)]
    null = os.stat(os.devnull).st_ino

    def check() -> None:
        for descriptor in free:
            os.close(descriptor)
        calls.occupy_standard_streams()
        for descriptor in range(3):
            expected = null if descriptor in free else before[descriptor]
            assert os.stat(descriptor).st_ino == expected
            assert os.get_inheritable(descriptor)

    assert end_of(fork(check)) == 0
