"""The one switch of the tests: a default run shows each promise once, `--thorough` shows the variations, too.

A variation is another value of something that a promise does not mention: a further seed, start method,
sampler, dtype or way to end, or a longer schedule of hypothesis. `conftest.py` reads the marks;
`tests/README.md` has the rule.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

#: Whether this run is a thorough one. Set by `conftest.pytest_configure`, before any test module is imported.
is_thorough = False
#: The share of their examples that properties have in a default run.
_QUICK = 10


def examples(thorough: int, **more: Any) -> settings:
    """Settings for a property: so many examples in a thorough run, a tenth in a default one, at least 10."""
    number = thorough if is_thorough else max(min(thorough, 10), thorough // _QUICK)
    return settings(max_examples=number, **more)


def thorough(*, after: int = 0, but: dict[str, Any] | None = None) -> pytest.MarkDecorator:
    """Mark a test for `--thorough`.

    Args:
        after: the first so many cases of a parametrised test run by default.
        but: argument → the value, or a list of the values, of the cases that run by default.
    """
    return pytest.mark.thorough(after=after, but=but or {})


def seeds(default: int, in_all: int) -> pytest.MarkDecorator:
    """Give a test the argument `seed`: so many seeds by default, and so many in a thorough run.
    `--seeds 7:99` has others."""
    return pytest.mark.seeds(default, in_all)
