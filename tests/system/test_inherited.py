"""What a new program inherits: each change of it is seen, and nothing else is."""

from __future__ import annotations

import pytest

from fastq_loader.system import inherited
from tests.support.forking import end_of, fork, in_child
from tests.support.inheritance import AS_ROOT, RIGHTS, SURROUNDINGS

pytestmark = pytest.mark.processes


def outcome(change: str) -> tuple[bool, bool]:
    """Whether the rights and the rest are others after a change."""
    rights, rest = inherited.rights(), inherited.rest()
    assert (inherited.rights(), inherited.rest()) == (rights, rest)
    assert len({hash(rights), hash(rest)}) == 2
    {**SURROUNDINGS, **RIGHTS}[change]()
    return inherited.rights() != rights, inherited.rest() != rest


@pytest.mark.parametrize("change", SURROUNDINGS)
@in_child
def test_a_change_of_the_surroundings_is_seen(change: str) -> None:
    def look() -> None:  # a child of the session's leader, which may lead a group and a session of its own
        assert outcome(change) == (False, True)

    assert end_of(fork(look)) == 0


@AS_ROOT
@pytest.mark.parametrize("change", RIGHTS)
@in_child
def test_a_change_of_roots_rights_is_seen(change: str) -> None:
    rights, _ = outcome(change)
    assert rights
