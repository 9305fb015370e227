"""An accelerator behind torch's generic interface alone, made of queues: nothing runs before it is told to.

Stands in for `torch.Stream`, `torch.Event` and `torch.accelerator`. Its kind is one that torch knows the name
of and has no module for, so whatever asks for `torch.<kind>` fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

KIND = "hpu"


@dataclass(unsafe_hash=True)
class Stream:
    """Equal to every other name of the same queue, as `torch.Stream` is."""

    device: torch.device
    stream_id: int
    capturing: bool = field(default=False, compare=False)

    def is_capturing(self) -> bool:
        return self.capturing


class Event:
    """Stands for what was queued when it was recorded last."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self._fake = fake
        self._mark = [True]

    def record(self, stream: Stream) -> None:
        mark = self._mark = [False]
        self._fake.queues[stream].append(lambda: mark.__setitem__(0, True))

    def wait(self, stream: Stream) -> None:
        self._fake.queues[stream].append(self._mark)

    def query(self) -> bool:
        return self._mark[0]

    def synchronize(self) -> None:
        while not self._mark[0]:
            assert any(self._fake.run(stream) for stream in self._fake.queues)


class FakeAccelerator:
    """Args:
        devices: how many there are.

    Attributes:
        asked: what was called that initialises a device, in order.
        index: the current device.
        queues: by stream; what a stream waits for stands in it as a list of one bool.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.asked: list[str] = []
        self.index = 0
        self.queues: dict[Stream, deque[Any]] = {}
        self._current = [self._new(index) for index in range(devices)]

    def _new(self, index: int) -> Stream:
        stream = Stream(torch.device(KIND, index), len(self.queues))
        self.queues[stream] = deque()
        return stream

    # ---- torch's interface ----------------------------------------------------------------------

    def current_accelerator(self) -> torch.device:
        return torch.device(KIND)

    def device_count(self) -> int:
        return self.devices

    def is_available(self) -> bool:
        return self.devices > 0

    def current_stream(self, device: torch.device | None = None, /) -> Stream:
        self.asked.append("current_stream")
        assert device is None or device.type == KIND
        index = None if device is None else device.index
        known = self._current[self.index if index is None else index]
        return Stream(known.device, known.stream_id)  # a new name, as torch has one for each call

    def set_stream(self, stream: Stream) -> None:
        self.index = stream.device.index
        self._current[self.index] = stream

    def Stream(self, device: torch.device) -> Stream:
        self.asked.append("Stream")
        return self._new(device.index)

    def Event(self, device: torch.device, *, blocking: bool = False) -> Event:
        assert blocking
        return Event(self)

    # ---- running what is queued -----------------------------------------------------------------

    def queue(self, action: Callable[[], Any]) -> None:
        """On the current stream."""
        self.queues[self._current[self.index]].append(action)

    def run(self, stream: Stream) -> bool:
        """Run what is queued on one stream, up to what it waits for; whether anything ran."""
        queue, ran = self.queues[stream], False
        while queue and not (isinstance(queue[0], list) and not queue[0][0]):
            action = queue.popleft()
            if not isinstance(action, list):
                action()
            ran = True
        return ran

    def finish(self) -> None:
        """Run everything."""
        while any(self.run(stream) for stream in self.queues):
            continue
        assert not any(self.queues.values()), "streams wait for each other"


class Memory:
    """Device memory, as far as a stager touches it: what is copied to it is queued."""

    def __init__(self, fake: FakeAccelerator, tensor: torch.Tensor) -> None:
        self._fake = fake
        self.tensor = tensor

    def __getitem__(self, part: slice) -> Memory:
        return Memory(self._fake, self.tensor[part])

    def copy_(self, source: Any, non_blocking: bool = False) -> None:
        assert non_blocking
        source = source.tensor if isinstance(source, Memory) else source
        self._fake.queue(lambda: self.tensor.copy_(source))


@contextmanager
def fake_accelerator(patch: pytest.MonkeyPatch, **options: Any) -> Iterator[FakeAccelerator]:
    """Inside, this is torch's accelerator."""
    fake = FakeAccelerator(**options)
    with patch.context() as patched:
        for name in ("current_accelerator", "device_count", "is_available", "current_stream", "set_stream"):
            patched.setattr(torch.accelerator, name, getattr(fake, name))
        patched.setattr(torch, "Stream", fake.Stream)
        patched.setattr(torch, "Event", fake.Event)
        yield fake
