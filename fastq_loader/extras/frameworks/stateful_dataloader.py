"""torchdata's `StatefulDataLoader`, by its name and with its arguments, as a subclass of our loader.

Runs in the consumer. States are saved and loaded by the methods of `DataLoader`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fastq_loader.loader import DataLoader, T_co
from fastq_loader.scheduling.schedules import RoundRobin


class StatefulDataLoader(DataLoader[T_co]):
    """A `DataLoader` with the arguments of torchdata's `StatefulDataLoader`, which it replaces.

    A state has a form of its own: states of torchdata's class are refused.

    Args:
        dataset, *args, **arguments: as for `DataLoader`.
        snapshot_every_n_steps: has no effect, and is kept as an attribute. torchdata's workers send their
            states every n batches, and after a resume up to n batches are read again. Ours send theirs with
            each batch.
        schedule: None is `RoundRobin(save_generators=True)`: as with torchdata, a dataset may draw random
            numbers, and a resumed epoch draws the same ones, with as many workers as before.

    Raises:
        ValueError, TypeError, RuntimeError: as for `DataLoader`.

    >>> loader = StatefulDataLoader(range(4), snapshot_every_n_steps=2)
    >>> first, state = next(iter(loader)), loader.state_dict()
    >>> again = StatefulDataLoader(range(4), snapshot_every_n_steps=2)
    >>> again.load_state_dict(state)
    >>> list(again)
    [tensor([1]), tensor([2]), tensor([3])]
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        *args: Any,
        snapshot_every_n_steps: int | None = 1,
        schedule: Any = None,
        **arguments: Any,
    ) -> None:
        with_state = RoundRobin(save_generators=True) if schedule is None else schedule
        super().__init__(dataset, *args, schedule=with_state, **arguments)
        self.snapshot_every_n_steps = snapshot_every_n_steps
