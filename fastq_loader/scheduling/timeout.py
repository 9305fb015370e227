"""How long the consumer waits for a message when the user has set a `timeout`.

Pure: the time is handed in.
"""

from __future__ import annotations


class Timeout:
    """torch's timeout is that of one message. Where workers may run far past a batch that hangs, it is the
    time that the next batch has taken.

    Args:
        timeout: in seconds; 0 is for ever.
        of_head: whether it is the next batch's.
    """

    def __init__(self, timeout: float, of_head: bool) -> None:
        self._timeout = timeout
        self._of_head = of_head
        self._awaited: tuple[int, int, float] | None = None  # batch, its attempt, since when
        self._graced: tuple[int, int, float] | None = None  # the same, once its timeout was over

    def seconds(self, seq: int, attempt: int, now: float) -> float | None:
        """Seconds to wait now for an attempt at batch `seq`, the next one; None is for ever."""
        if not self._timeout:
            return None
        if not self._of_head:
            return self._timeout
        if self._awaited is None or self._awaited[:2] != (seq, attempt):
            self._awaited = (seq, attempt, now)
        return max(self._awaited[2] + self._timeout - now, 0)

    def is_over(self, message: bool) -> bool:
        """Whether it is not just this process that was stopped for that long: then a `message` is there as
        soon as it goes on. An attempt at a batch is given that grace once."""
        if not message:
            return True
        again, self._graced = self._graced, self._awaited
        return self._awaited is not None and again == self._awaited

    def forget(self) -> None:
        """The wait was given up."""
        self._awaited = None
