"""The reader of a dataset: the batches of one epoch after the other, from where they begin or go on.

Runs in workers, and in the consumer with num_workers=0, on the thread that asks for batches. Random numbers
are left to the user's generators, or seeded anew for each batch.

What a resumed epoch needs from a reader is its state: a dict with what `position` says of the dataset and,
where it was asked for, the states of its generators. It comes back with the epoch, with the number of the
reader's batches that were handed out before. Of an iterable dataset those are passed over; where there is no
position, they are read again. A state that is "over" is of the end of the epoch before: the new one begins
from there. One that has a "seed" knows of no generators.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fastq_loader.reading import generators, position
from fastq_loader.reading.fetch import EndOfStream, Fetcher
from fastq_loader.reading.tolerance import Tolerance, TolerantFetcher


class HandedOutBefore(Exception):
    """The batch was handed out before the epoch was resumed."""


class Reader:
    """The user's objects, from which batches are loaded.

    Args:
        dataset, collate, errors: the user's; None for `errors`: each is raised.
        rules: how samples become batches: the arguments of `Fetcher`.
        number, readers: which one it is, of how many.
        saves_generators: whether its state has the generators that user code may draw from.
        reseeds: whether those of dataset and collate function are seeded for each batch, too.

    Attributes:
        dataset: may be set before an epoch begins.
        fetcher: of the epoch.
        ended: nothing more is to be loaded in this epoch.
        to_pass: batches that are still to be passed over.
        base_seed: which every batch is seeded from; None: none is.
    """

    fetcher: Fetcher
    base_seed: int | None = None
    ended = False
    to_pass = 0

    def __init__(
        self,
        dataset: Any,
        collate: Any,
        errors: Tolerance | None,
        rules: dict[str, Any],
        number: int = 0,
        readers: int = 1,
        saves_generators: bool = False,
        reseeds: bool = False,
    ) -> None:
        self.dataset = dataset
        self._collate, self._errors, self._rules = collate, errors, rules
        self._number, self._readers = number, readers
        self._iterable = rules["iterable"]
        self._saves_generators, self._reseeds = saves_generators, reseeds
        self._epoch = self._asked = 0  # of the epoch, how many batches were asked for
        self._replays = False  # what is passed over has to be read again
        self._resumed: dict[str, Any] = {}  # the state to go on from

    def begin(self, epoch: int, base_seed: int | None, delivered: int, state: dict[str, Any] | None) -> None:
        """Make the fetcher of an epoch.

        Args:
            epoch: its number.
            base_seed: of its batches, or None.
            delivered, state: see above; None: it begins.

        Raises:
            Exception: whatever user code raises.
        """
        self.ended, self._asked = False, 0
        self.base_seed, self._epoch, self._resumed = base_seed, epoch, state or {}
        self.to_pass = delivered if self._iterable else 0
        self._replays = "position" not in self._resumed
        rules = {**self._rules, "collate": self._collate, "errors": self._errors}
        place = self._resumed.get("position")
        if base_seed is not None:
            generators.seed_worker(base_seed, self._number)  # for what iter(dataset) draws
        if "seed" in self._resumed:
            generators.seed_worker(self._resumed["seed"], self._number)
        if self._resumed.get("over"):
            if place is not None:
                position.fetcher_at({**place, "ended": True}, self.dataset, **rules)
            place = None
            self._set_generators()  # `iter(dataset)` may draw
        self.fetcher = position.fetcher_at(place, self.dataset, **rules)
        self._set_generators()

    def _set_generators(self) -> None:
        """Not before the batches that are read again: they draw."""
        if self.to_pass and self._replays:
            return
        for name, state in self._resumed.pop("generators", {}).items():
            if name in (own := self._generators()):
                generators.set_state(own[name], state)

    def _generators(self) -> dict[str, Any]:
        return {**generators.GLOBAL, **self._own_generators()}

    def _own_generators(self) -> dict[str, Any]:
        return generators.find({"dataset": self.dataset, "collate_fn": self._collate})

    def put_back(self) -> generators.restored:
        """A context that leaves all generators as they were that are seeded for a batch in it."""
        own = self._own_generators() if self._reseeds else {}
        return generators.restored([*generators.GLOBAL.values(), *own.values()])

    def load(self, seq: int, index: Any) -> Any:
        """Batch number `seq` of the epoch.

        Raises:
            EndOfStream: an iterable dataset has no further one.
            HandedOutBefore: the epoch was resumed after this batch.
            Exception: whatever user code raises.
        """
        fetcher = self.fetcher
        if self.base_seed is not None:
            self._seed(self.base_seed, seq)
        self._asked += 1
        if self.to_pass:
            self._pass_over(index)
        if type(fetcher) is TolerantFetcher:
            fetcher.place = self._epoch, seq
        try:
            return fetcher.fetch(index)
        except EndOfStream:
            self.ended = True
            raise

    def _seed(self, base_seed: int, seq: int) -> int:
        """A batch is seeded by its number. Of an iterable dataset it is the number that it has if no reader
        ends before: how many tasks the others still get depends on when they end."""
        number = self._asked * self._readers + self._number if self._iterable else seq
        own = self._own_generators() if self._reseeds else {}
        return generators.seed_batch(base_seed, number, own)

    def _pass_over(self, index: Any) -> NoReturn:
        if self._replays:
            try:
                self.fetcher.fetch(index)
            except EndOfStream:
                self.ended = True
                raise
            except Exception:  # of user code; it was raised at its position before
                pass
        self.to_pass -= 1
        self._set_generators()
        raise HandedOutBefore

    def said(self) -> bytes:
        """A pickle of what it goes on from if the last batch is the last that is handed out; b"": nothing."""
        fetcher = self.fetcher
        if fetcher.stateful is False and not self._saves_generators:  # as a rule; and quicker so
            return b""
        more: dict[str, Any] = {}
        if self._saves_generators:
            own = self._generators().items()
            more["generators"] = {name: generators.state_of(generator) for name, generator in own}
        if self.ended and (more or position.is_known(fetcher)):
            more["over"] = True
        return position.packed(fetcher, **more)
