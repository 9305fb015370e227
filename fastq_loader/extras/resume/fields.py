"""The parts of a saved state.

Pure. The names of the fields of `EpochSnapshot` and of `epoch.fields.EpochStart`, and their order, are part
of the format of `state_dict()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastq_loader.epoch.fields import EpochStart, Position
from fastq_loader.scheduling.progress import START, Progress


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
        sampler_state: of a stateful sampler; see `reading.position.state_of`.
        initial_seed: for `samplers.set_initial_seed`, or None.
        other_size: the loader has another batch size than the state, so its draws end elsewhere.
    """

    state: dict[str, Any]
    start: EpochStart
    now: EpochSnapshot = field(default_factory=EpochSnapshot)
    progress: Progress = START
    sampler_state: dict[str, Any] = field(default_factory=dict)
    initial_seed: int | None = None
    other_size: bool = False

    @property
    def position(self) -> Position:
        """The loader's position with it."""
        delivered = self.progress.delivered
        return Position(self.start.epoch, delivered, self.start.batches + delivered)
