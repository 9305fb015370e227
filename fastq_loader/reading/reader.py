"""Reads a dataset: loads the batches of each epoch, from its beginning or from a saved state.

Runs in workers, and in the consumer with num_workers=0, on the thread that requests batches. The random
generators of user code are used as they are, or seeded again for each batch.

The reader's state is a dict with the dataset's position (see `position`) and, if requested, the states of the
generators. To resume an epoch, the reader gets the state back, with the number of its batches that were
delivered before. For an iterable dataset, it skips these batches; if the state has no position, it reads them
again. A state with "over" is from the end of the previous epoch, and the new epoch begins there. A state with
a "seed" has no states of generators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from fastq_loader.reading import generators, position
from fastq_loader.reading.fetch import EndOfStream, Fetcher, loading


class DeliveredBefore(Exception):
    """The batch was delivered before the epoch was resumed."""


class Reader:
    """Loads batches with the user's dataset and collate function.

    Args:
        dataset, collate: the user's.
        make_fetcher: `Fetcher`, or what an `ErrorPolicy` has in its place.
        rules: how samples become batches: the arguments of `Fetcher`.
        number, readers: the number of this reader, and how many there are.
        saves: what its state contains: "dataset" (its position), or "generators" (the position, and all that
            user code may draw from); "": it has none.

    Attributes:
        dataset: may be set before an epoch begins.
        fetcher: fetcher of the current epoch.
        ended: nothing is left to load in this epoch.
        to_pass: number of batches still to be skipped.
        base_seed: seed from which the seed of every batch is derived; None: batches are not seeded.
        sample_seed: base seed of the epoch, for the seeds of samples; set before an epoch begins.
        seq: number of the batch that is loaded.
        requested: number of batches that were requested in this epoch.
        newest: the newest seed of a sample, see `extras.images.sample_seeds`.
        worker_info: torch's, of the worker that this reader is in, or None: its seed is that of the batch.
        sampler: samples the stack inside of its context (`extras.profile`), or None.
    """

    fetcher: Fetcher
    base_seed: int | None = None
    sample_seed = seq = 0
    newest: Any = None
    ended = False
    to_pass = 0
    worker_info: Any = None
    sampler: Any = None

    def __init__(
        self,
        dataset: Any,
        collate: Any,
        make_fetcher: Callable[..., Fetcher],
        rules: dict[str, Any],
        number: int = 0,
        readers: int = 1,
        saves: str = "",
    ) -> None:
        self.dataset = dataset
        self._collate, self._make_fetcher, self._rules = collate, make_fetcher, rules
        self._number, self._readers = number, readers
        self._saves = saves
        self._epoch = self.requested = 0  # its number
        self._resumed: dict[str, Any] = {}  # the state from which it resumes

    def begin(self, epoch: int, base_seed: int | None, delivered: int, state: dict[str, Any] | None) -> None:
        """Create the fetcher of an epoch.

        Args:
            epoch: its number.
            base_seed: see the attribute.
            delivered, state: see the module's docstring; `state=None`: the epoch starts from the beginning.

        Raises:
            Exception: whatever user code raises.
        """
        self.ended, self.requested = False, 0
        self.base_seed, self._epoch, self._resumed = base_seed, epoch, state or {}
        self.to_pass = delivered if self._rules["iterable"] else 0
        self._replays = "position" not in self._resumed  # skipped batches have to be read again
        make = partial(self._make_fetcher, self.dataset, **self._rules, collate=self._collate)
        dataset_state = self._resumed.get("position")
        if base_seed is not None:
            generators.seed_worker(base_seed, self._number)  # iter(dataset) may draw
        if "seed" in self._resumed:
            generators.seed_worker(self._resumed["seed"], self._number)
        if "over" in self._resumed:
            if dataset_state is not None:
                position.fetcher_at({**dataset_state, "ended": True}, self.dataset, make)
            dataset_state = None
            self._set_generators()  # `iter(dataset)` may draw
        self.fetcher = position.fetcher_at(dataset_state, self.dataset, make) if dataset_state else make()
        if state:
            self._set_generators()

    def _set_generators(self) -> None:
        """Restore the generators, unless batches are still to be read again, which draws from them."""
        if self.to_pass and self._replays:
            return
        if states := self._resumed.pop("generators", {}):
            generators.set_states(self._generators(), states)

    def _generators(self) -> dict[str, Any]:
        roots = {"dataset": self.dataset, "collate_fn": self._collate}
        return {**generators.GLOBAL, **generators.find(roots, but=[generators.GLOBAL["torch"]])[0]}

    def load(self, seq: int, index: Any) -> Any:
        """Load batch number `seq` of the epoch.

        Raises:
            EndOfStream: an iterable dataset has no further batch.
            DeliveredBefore: the batch was delivered before the epoch was resumed.
            Exception: whatever user code raises.
        """
        fetcher = self.fetcher
        if self.base_seed is not None:
            self._seed(self.base_seed, seq)
        self.requested += 1
        if self._make_fetcher is not Fetcher:
            fetcher.batch_numbers = self._epoch, seq
        self.seq = seq
        outer, loading.reader = loading.reader, self  # a dataset may read from another loader meanwhile
        try:
            if self.to_pass:
                self._skip(index)
            if self.sampler is not None:
                with self.sampler:
                    return fetcher.fetch(index)
            return fetcher.fetch(index)
        except EndOfStream:
            self.ended = True
            raise
        finally:
            loading.reader = outer

    @property
    def numbers(self) -> tuple[int, ...]:
        """Base seed of the epoch, and number of the batch that is loaded; of an iterable dataset the numbers
        of readers, of this reader, and of its batch."""
        of_reader = self._readers, self._number, self.requested
        return self.sample_seed, *(of_reader if self._rules["iterable"] else (self.seq,))

    def _seed(self, base_seed: int, seq: int) -> None:
        """Seed the generators for a batch by its number. For an iterable dataset, count as if no
        reader had ended early: the batch's real number depends on when one ended."""
        number = self.requested * self._readers + self._number if self._rules["iterable"] else seq
        seed = generators.seed_batch(base_seed, number)
        if self.worker_info is not None:  # torch's class does not let its attributes be set
            object.__setattr__(self.worker_info, "seed", seed)

    def _skip(self, index: Any) -> NoReturn:
        """Skip a batch that was delivered before; if necessary, read it again."""
        if self._replays:
            try:
                self.fetcher.fetch(index)
            except EndOfStream:
                raise
            except Exception:  # of user code; it was already raised at this position
                pass
        self.to_pass -= 1
        self._set_generators()
        raise DeliveredBefore

    def state_bytes(self) -> bytes:
        """Return the state after the last batch, pickled; b"" if there is nothing to save."""
        fetcher = self.fetcher
        if not self._saves or (fetcher.stateful is False and self._saves == "dataset"):  # the usual case
            return b""
        more: dict[str, Any] = {}
        if self._saves == "generators":
            more["generators"] = generators.states_of(self._generators())
        if self.ended and (more or position.is_known(fetcher)):
            more["over"] = True
        return position.packed(fetcher, **more)
