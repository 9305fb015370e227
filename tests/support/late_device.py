"""A device made of CPU memory whose copies run late, for whole loaders: what a real one may do, made likely.

Nothing is ever queued on the consumer's stream: it reads a batch as soon as it has waited for it. The side
stream falls behind as far as it may: a copy runs when something waits for it, or now and then at a query.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.device import accelerator, staging
from fastq_loader.device.accelerator import TorchBackend
from fastq_loader.errors import PinFailed
from fastq_loader.packing.tensors import moved

POISON = 0xEE  # what device memory holds before a copy


def image_and_label(index: int) -> Any:
    """A sample whose batches lie in blocks of their own, from three samples on."""
    return torch.full((3, 96, 96), index % 251, dtype=torch.uint8), index


class Event:
    def __init__(self) -> None:
        self.over = True


class LateBackend(TorchBackend):
    """Behaves like an accelerator; see `accelerator.TorchBackend`.

    Args:
        seed: of the moments at which copies run.
        refuse: what cannot be page-locked: "register", "pinned".
        runs: whether copies run now and then, and not only where something waits for them.
    """

    def __init__(self, seed: int = 0, refuse: tuple[str, ...] = (), runs: bool = True) -> None:
        self.device = torch.device("cpu")
        self.side = "side"
        self.current = "consumer"
        self.is_capturing = False
        self.registered: dict[int, int] = {}
        self.copies: list[int] = []  # bytes of each
        self._refuse = refuse
        self._random = random.Random(seed)
        self._often = 0.3 * runs
        self.queued: deque[Callable[[], None]] = deque()

    def current_stream(self) -> str:
        return self.current

    def capturing(self) -> bool:
        return self.is_capturing

    def prove(self) -> None:
        self.register(0, 1)
        self.unregister(0)

    def empty(self, nbytes: int) -> torch.Tensor:
        return super().empty(nbytes).fill_(POISON)

    def copy_async(self, memory: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        self.copies.append(nbytes)

        def run() -> None:
            memory[:nbytes].copy_(source[:nbytes])

        self.queued.append(run)

    def record(self, stream: Any) -> Any:
        event = Event()
        if stream == self.side:
            event.over = False
            self.queued.append(lambda: setattr(event, "over", True))
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if stream != self.side:
            self.synchronize(event)

    def query(self, event: Any) -> bool:
        while self.queued and self._random.random() < self._often:
            self.queued.popleft()()
        return bool(event.over)

    def synchronize(self, event: Any) -> None:
        while not event.over:
            self.queued.popleft()()

    def share(self, memory: Any, stream: Any) -> None:
        """No memory is allocated again here while a tensor has it."""

    def on_side(self, call: Callable[[], Any]) -> Any:
        while self.queued:
            self.queued.popleft()()
        return call()

    def pinned(self, nbytes: int) -> torch.Tensor:
        if "pinned" in self._refuse:
            raise PinFailed("no page-locked memory today")
        return self.pageable(nbytes)

    def register(self, address: int, nbytes: int) -> None:
        if "register" in self._refuse:
            raise PinFailed("the driver refuses")
        assert address not in self.registered, "registered twice"
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.from_numpy(np.empty(0, np.uint8))
        return super().view(address, nbytes)


Late = Callable[..., LateBackend]  # the fixture `late`


def move_late(patch: pytest.MonkeyPatch, device: LateBackend) -> Callable[[], None]:
    """From here on tensors on the host are not on the device, and those that are moved there by themselves
    are read when the result is called, as page-locked ones may be."""
    device.device = torch.device("cpu", 0)  # which is no tensor's
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(value: Any, there: torch.device) -> Any:
        result = moved(value, there)
        if result is not value:
            moves.append((result, value))
        return result

    def finish() -> None:
        with torch.no_grad():
            for there, here in moves:
                there.copy_(here)
        moves.clear()

    patch.setattr(staging, "moved", move)
    return finish


def use_late(patch: pytest.MonkeyPatch, **options: Any) -> LateBackend:
    """From here on device="cuda" is this."""
    backend = LateBackend(**options)
    patch.setattr(staging, "TorchBackend", lambda device: backend)
    patch.setattr(accelerator, "parse", lambda device: torch.device("cpu"))
    return backend


@contextmanager
def late_device(patch: pytest.MonkeyPatch, **options: Any) -> Iterator[LateBackend]:
    """Inside, device="cuda" is this."""
    with patch.context() as patched:
        yield use_late(patched, **options)
