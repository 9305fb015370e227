"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest

from fastq_loader.memory.arena import AVAILABLE
from tests.support.pair import Pair, paired


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A worker and its consumer; in modules with `FOR_DEVICE` batches go on to a device."""
    if not AVAILABLE:
        pytest.skip("this system has no memfd")
    with paired(for_device=getattr(request.module, "FOR_DEVICE", False)) as pair:
        yield pair
