"""The interface of `errors=`: a policy, which makes the fetcher and judges unreadable samples.

Runs in the consumer. `extras.bad_samples` has the policies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from fastq_loader.reading.fetch import Fetcher


class ErrorPolicy:
    """Base class of the policies."""

    def check(self, iterable: bool) -> None:
        """Raise a ValueError if the policy cannot be used with such a dataset."""

    @abstractmethod
    def fetchers(self, index_sampler: Any, iterable: bool) -> Callable[..., Fetcher]:
        """The factory of a loader's fetchers, with `Fetcher`'s arguments. It is sent to the workers."""

    @abstractmethod
    def records(self, state: dict[str, Any]) -> Any:
        """The records of a loader: `pending_warnings`, which `issue_warnings` issues; for statistics `total`
        and `last`. `state`: of a judge, in a state that was loaded, or {}."""

    @abstractmethod
    def judge(self, records: Any, epoch: int, in_batches: bool, state: dict[str, Any]) -> Any:
        """The judge of an epoch. `judge(batch, index, remark)` counts a batch with the fetcher's `remark`. It
        returns None, or the error to raise in its place. `state()` returns a later `state`."""


def read_errors(errors: Any, iterable: bool = False) -> ErrorPolicy | None:
    """Validate the argument `errors=`; None: every error is raised.

    Raises:
        ValueError: `errors` is an unknown string, or cannot be used with an iterable dataset.
        TypeError: `errors` has another type.
    """
    if isinstance(errors, ErrorPolicy):
        errors.check(iterable)
        return errors
    if errors == "raise":
        return None
    raise (ValueError if isinstance(errors, str) else TypeError)(
        f"errors={errors!r} is unknown: use 'raise', Replace(...) or Skip(...)"
    )
