"""Records of an epoch: its start and a snapshot of it, which a saved state contains as text, and such a state
after it was read.

Pure. The names of the fields of `EpochStart` and `EpochSnapshot`, and their order, are part of the format of
`state_dict()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastq_loader.scheduling.progress import START, Progress


class Position(NamedTuple):
    """Progress of a loader.

    Attributes:
        epoch: number of epochs that are over.
        batch: number of batches delivered in the current epoch, including errors.
        batches: number of batches delivered in all epochs.

    >>> loader = DataLoader(range(8), 2)
    >>> batches = list(loader)
    >>> loader.position
    Position(epoch=1, batch=0, batches=4)
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0


@dataclass
class EpochStart:
    """The part of an epoch that stays the same after its first index was drawn, and is not compared with the
    loader.

    Attributes:
        epoch, batches: number of epochs that are over, and of batches delivered in them.
        resumes: whether a state with it continues in the middle of the epoch.
        base_seed, shared_seed: see `generators` and `datapipes`.
        lives_on: whether its workers serve the next epoch, for which torch then draws no base seed.
        states: states of the generators that the sampler may draw from, right before it was iterated.
        first: states right before the first index was drawn, where they differ from `states`.
        epochs: see `samplers.epochs`.
    """

    epoch: int = 0
    batches: int = 0
    resumes: bool = False
    base_seed: int = 0
    shared_seed: int | None = None
    lives_on: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochSnapshot:
    """The part that changes with each batch, besides torchdata's four keys.

    Attributes:
        generators: states of the loader's own generators after the draws, by name.
        beyond: see `Progress`.
        drawn: number of positions drawn, including undelivered ones.
        exhausted: whether the sampler ended after them; it may have drawn random numbers then.
        digest: number and `digested` of the batches drawn, or of the permutations of a shuffle. None where
            the order follows from compared fields, or the sampler is stateful.
        part: see `samplers.part_of_data`; the digest belongs to it.
        workers: for each reader, the number of delivered batches, and its state without the dataset's.
        bad_samples: `state()` of the judge of bad samples, or {}.
    """

    generators: dict[str, Any] = field(default_factory=dict)
    beyond: tuple[int, ...] = ()
    drawn: int = 0
    exhausted: bool = False
    digest: tuple[int, int] | None = None
    part: str = ""
    workers: tuple[tuple[int, dict[str, Any]], ...] = ()
    bad_samples: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A saved state that was read, and fits its loader.

    Attributes:
        state: the state itself, as the user passed it.
        start, now: its parts, where `now` has no digest if the order may be another one.
        progress: of the epoch that it continues; else of the workers only.
        place: state of a stateful sampler; see `reading.position.place_of`.
        ahead: of a stateful sampler, the indices drawn and not delivered; see `strategies.as_json`.
    """

    state: dict[str, Any]
    start: EpochStart
    now: EpochSnapshot = field(default_factory=EpochSnapshot)
    progress: Progress = START
    place: dict[str, Any] = field(default_factory=dict)
    ahead: tuple[Any, ...] = ()

    @property
    def position(self) -> Position:
        """The loader's position with it."""
        delivered = self.progress.delivered
        return Position(self.start.epoch, delivered, self.start.batches + delivered)
