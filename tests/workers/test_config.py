"""What a pool and its workers are told."""

from __future__ import annotations

import pytest

from fastq_loader.memory.arena import Arena
from tests.support.worker_setup import MAP_STYLE, STREAM, make_plan, make_setup


@pytest.mark.parametrize(
    ("dynamic", "rules", "shared"),
    [(True, MAP_STYLE, True), (True, STREAM, False), (False, MAP_STYLE, False)],
)
def test_tasks_of_a_stream_are_never_shared(dynamic: bool, rules: object, shared: bool) -> None:
    assert make_plan(range(3), dynamic=dynamic, rules=rules).shared_tasks is shared


def test_a_setup_does_not_print_its_token(arena: Arena) -> None:
    setup = make_setup(arena, range(3))
    assert "token" not in repr(setup)
    assert repr(setup.token) not in repr(setup)
