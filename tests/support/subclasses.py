"""Subclasses of a loader as people write them, which use the names of our options for something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Elsewhere:
    """What a mixin does."""

    def use(self, device: Any) -> Any:
        self.device = device
        return self


def before_the_constructor(kind: Any) -> Any:
    class Mine(kind):
        def __init__(self, *args: Any, **more: Any) -> None:
            self.device = "gpu7"
            super().__init__(*args, **more)

    return Mine(range(6), 2)


def after_the_constructor(kind: Any) -> Any:
    class Mine(kind):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.device, self.workers = "gpu7", 3
            self.errors: list[str] = []
            self.schedule = self.batch_size

    return Mine(range(6), 2)


def attributes_of_the_class(kind: Any) -> Any:
    class Mine(kind):
        device, workers, schedule = "gpu7", 9, None
        errors: tuple[str, ...] = ()

    return Mine(range(6), 2)


def a_property_that_is_set(kind: Any) -> Any:
    class Mine(kind):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.device = "gpu"

        @property
        def device(self) -> str:
            return self._device

        @device.setter
        def device(self, value: str) -> None:
            self._device = value + "7"

    return Mine(range(6), 2)


def a_method_of_that_name(kind: Any) -> Any:
    class Mine(kind):
        def schedule(self) -> int:
            return 3

    loader = Mine(range(6), 2)
    assert loader.schedule() == 3
    return loader


def later(kind: Any) -> Any:
    class Mine(kind):
        def to(self, device: Any) -> Any:
            self.device = device
            return self

    return Mine(range(6), 2).to("gpu7")


def a_mixin_before(kind: Any) -> Any:
    return type("Mine", (Elsewhere, kind), {})(range(6), 2).use("gpu7")


SUBCLASSES: list[Callable[[Any], Any]] = [
    *(before_the_constructor, after_the_constructor, attributes_of_the_class),
    *(a_property_that_is_set, a_method_of_that_name, later, a_mixin_before),
]
