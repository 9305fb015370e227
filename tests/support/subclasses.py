"""Subclasses of a loader as people write them, which use the names of our options for something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


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


def a_property(kind: Any) -> Any:
    class Mine(kind):
        @property
        def device(self) -> str:
            return "gpu7"

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


def a_mixin_behind(kind: Any) -> Any:
    return type("Mine", (kind, Elsewhere), {})(range(6), 2).use("gpu7")


def wrapped(kind: Any) -> Any:
    class Mine(kind):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.device = "gpu7"

    return Mine(range(6), 2)


def moves_its_batches(kind: Any) -> Any:
    class Mine(kind):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.device = torch.device("cpu")

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield batch.to(self.device)

    loader = Mine(range(6), 2)
    loader.device = torch.device("meta")
    return loader


SUBCLASSES: list[Callable[[Any], Any]] = [
    *(
        before_the_constructor,
        after_the_constructor,
        attributes_of_the_class,
        a_property,
        a_property_that_is_set,
    ),
    *(a_method_of_that_name, later, a_mixin_before, a_mixin_behind, wrapped, moves_its_batches),
]
