"""`StatefulDataLoader`: our loader with torchdata's methods `state_dict` and `load_state_dict`.

Runs in the consumer. `DataLoader` has neither method: frameworks call them on every loader that has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset

from fastq_loader import options
from fastq_loader.epoch.fields import Resumable
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.extras.resume import saved, state
from fastq_loader.loader import DataLoader, T_co
from fastq_loader.scheduling.schedules import LIKE_TORCHDATA
from fastq_loader.system.torch_names import untraced


@untraced
class StatefulDataLoader(DataLoader[T_co], Resumable):
    """A `DataLoader` that can be stopped in the middle of an epoch, and resumed. It takes the arguments of
    torchdata's `StatefulDataLoader`, which it replaces.

    A dataset whose `state_dict` takes arguments is not asked, and a state that cannot be copied is left out,
    with a `LoaderHint`.

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
        with_state = LIKE_TORCHDATA if schedule is None else schedule
        super().__init__(dataset, *args, schedule=with_state, **arguments)
        self.snapshot_every_n_steps = snapshot_every_n_steps

    def __iter__(self) -> Any:
        return state.begun(self, super().__iter__)

    def state_dict(self) -> dict[str, Any]:
        """The state of this loader, from which `load_state_dict` resumes.

        Counts the batches that were handed out, not those only prefetched by workers or by a `Prefetcher`.
        May be called at any time: before the first batch, after any batch, and at the end of an epoch. A
        state from before the first `iter()` contains the loader's own generator and stateful samplers, and
        fixes nothing else of the first epoch.

        Returns:
            A new plain dict of some 15 kB, unless the user's own states in it are larger, plus up to 300
            bytes for each of the last thousand bad samples. `json.dumps` accepts it if it accepts the user's
            states. It does not contain the current states of torch's, Python's and numpy's global generators:
            save these with the model, as frameworks do, or pass `generator=` to the loader.

        Raises:
            Exception: whatever `state_dict` of a sampler raises.
            RuntimeError: `state_dict` of the dataset or its iterator raised; or it is called inside of
                `iter()`, by a signal handler.

        >>> loader = StatefulDataLoader(range(8), 2, shuffle=True)
        >>> batches = [next(iter(loader))]
        >>> state = loader.state_dict()
        >>> loader.load_state_dict(state)
        >>> sorted(torch.cat(batches + list(loader)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
        """
        unknown = resources_of(self).record is None and options.torchs_own(
            self, asked="state_dict() is empty"
        )
        return {} if unknown else state.now(self)

    def load_state_dict(self, state_dict: dict[str, Any], *, ignore: Iterable[str] = ()) -> None:
        """Resume from the state of another loader, or of this one: the next epoch is the rest of the epoch
        that was saved.

        Samples of batches that were handed out are not loaded again, except for an iterable dataset without
        `state_dict`. The resumed epoch draws nothing from the global generators: its draws were made before
        it was saved. A state saved after the last batch gives an epoch without batches; a state saved when
        the epoch was over gives the next epoch.

        With another batch size, the epoch goes on after the samples that were delivered, if the dataset is
        map-style and its order is computed: without a sampler of the user's, or with `DistributedSampler`,
        `PermutationSampler` or `WeightedSampler`.

        Args:
            state_dict: the result of `state_dict()`, also after a round trip through JSON; `{}` starts anew.
            ignore: names of fields in which this loader may differ from the saved one: "dataset_kind",
                "dataset_length", "batch_size", "sampler", "seed", "initial_seed", "num_replicas",
                "replacement", "generator", "schedule", "num_workers", "order" (the indices of the sampler).
                Unless "initial_seed" is among them, a sampler's attribute of that name (Accelerate's
                `SeedableRandomSampler` has it) is set to the saved value, and not compared.

        Raises:
            ValueError: the state is damaged, foreign or of a later version, or does not fit the loader. The
                text has the field, the saved value and the loader's; the loader is unchanged. If the sampler
                yields other indices than before, `iter()` raises it.
            TypeError: `ignore` is not a collection of names.

        >>> StatefulDataLoader(range(9)).load_state_dict(StatefulDataLoader(range(8)).state_dict())
        Traceback (most recent call last):
        ValueError: ...dataset_length...
        """
        resources = resources_of(self)
        with resources.lock:
            if state_dict == {}:
                resources.current = None, None
                return
            loaded = saved.read(state_dict, self, ignore)
            saved.take(loaded, self)
            resources.current = resources.record, loaded
            errors = options.of(self).errors
            resources.bad_samples = None if errors is None else errors.records(loaded.now.bad_samples)
        vars(self)["_iterator"] = None  # its workers have drawn other random numbers than the saved ones
