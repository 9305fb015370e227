"""The gate of a pool of workers: whether a call may enter, as one table of moves.

Pure. `phase` is written by the call inside, which holds the pool's lock; `end` by whoever ends the pool, on
any thread and in signal handlers. The event loop assigns both directly, without a call: a signal handler may
raise at the beginning of any call.
"""

from __future__ import annotations

from fastq_loader.errors import Transitions

OPEN = "open"
#: A call is running; or an exception ended one in the middle of a step, which only the next call finds out.
INSIDE = "inside"
#: A call sleeps, with nothing half done; or an interrupt ended one that slept. Another call may enter.
WAITING = "waiting"
#: A call was ended in the middle of a step, and the next one found out: no further call can go on.
CUT_SHORT = "cut short"
#: The ends. FAILED: by a worker's failure; its iterator is exhausted, as in torch.
FAILED, CLOSED, EXITING = "failed", "closed", "exiting"

_ENDS = {"close": CLOSED, "exit": EXITING}
MOVES = Transitions(
    "a pool of workers",
    {
        OPEN: {"enter": INSIDE, **_ENDS},
        INSIDE: {"wait": WAITING, "leave": OPEN, "enter": CUT_SHORT, "fail": FAILED, **_ENDS},
        WAITING: {"enter": INSIDE, "leave": OPEN, **_ENDS},
        CUT_SHORT: {"enter": CUT_SHORT, **_ENDS},
        FAILED: {"close": FAILED, "exit": FAILED},
        CLOSED: {"close": CLOSED, "exit": CLOSED},
        EXITING: {"close": EXITING, "exit": EXITING},
    },
)


class Gate:
    """The state of a pool's gate.

    Attributes:
        phase: that of the calls: OPEN, INSIDE, WAITING or CUT_SHORT.
        end: FAILED, CLOSED or EXITING once the pool has ended, or is about to; else None.
        reason: why it has ended, or None.
    """

    def __init__(self) -> None:
        self.phase = OPEN
        self.end: str | None = None
        self.reason: str | None = None

    def shut(self, event: str, reason: str) -> None:
        """End the pool, unless it has ended."""
        end = MOVES[self.end or self.phase, event]
        if end != self.end:
            self.end, self.reason = end, reason
