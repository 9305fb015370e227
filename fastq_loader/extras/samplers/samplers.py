"""Samplers whose order is computed from a seed and the epoch: a shuffle, a weighted draw, and a rank's share
of any other sampler's order.

Runs in the consumer, on the thread that calls `next()`. Nothing is drawn from the generators of the process.
A keyed permutation computes the item at any position of a shuffle on its own, or the random number of a
weighted draw. So these orders need no memory, begin at once and continue from any position, on any rank; only
a draw without replacement is sorted when an epoch begins. All bits are the same on every machine.
"""

from __future__ import annotations

import contextlib
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastq_loader.errors import shorten
from fastq_loader.extras.samplers import seeds
from fastq_loader.reading import generators
from fastq_loader.reading.computed import ComputedSampler

_Array = np.ndarray[Any, np.dtype[Any]]

#: Indices computed at a time; larger chunks are not faster.
_CHUNK = 8192
#: Indices that `Distributed` draws again to compare orders, if one draw has fewer.
_DRAWN_AGAIN = 1000

_ROUNDS = 24
#: Sorting up to this many numbers takes less time than setting up the network.
_FEW = 1024
_MULTIPLIER = np.uint64(0xD2B74407B1CE6E93)
_LOW = np.uint64(0xFFFFFFFF)


def seed_sequence(*key: int) -> np.random.SeedSequence:
    """Mix two non-negative integers, a seed and an epoch.

    Their 32-bit words alternate, so that no two pairs have the same words. numpy mixes up to four words by
    steps that can be undone: no two pairs of numbers below 2^64 have the same mix. More words are hashed to
    128 bits. (A `SeedSequence` of both numbers joins their words: 1 + 5·2^32 and 0 would be 1 and 5.)
    """
    length = max(2, *(-(-number.bit_length() // 32) for number in key))
    return np.random.SeedSequence([number >> 32 * at & 0xFFFFFFFF for at in range(length) for number in key])


class Permutation:
    """A permutation of the numbers from 0 to n-1, determined by a key.

    VariablePhilox with 24 rounds (Mitchell, Stokes, Frank, Holmes: "Bandwidth-Optimal Random Shuffling for
    GPUs", ACM Transactions on Parallel Computing 9, 2022), which Thrust's `shuffle` uses: an unbalanced
    Feistel network over as many bits as n needs. An output of n or more is put through the network again
    until it is below n (cycle walking; Black, Rogaway: "Ciphers with Arbitrary Finite Domains", CT-RSA
    2002), which takes fewer than two passes on average. Such a network yields only even permutations of its
    2^bits numbers, and on 4 bits not all equally often: up to `_FEW` numbers are sorted by random words.

    Args:
        n: how many numbers, from 0 to 2^62.
        key: see `seed_sequence`.
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        words = seed_sequence(*key)
        self._few = np.argsort(words.generate_state(n, np.uint64)).astype(np.uint64) if n <= _FEW else None
        bits = max(2, (n - 1).bit_length())
        left = bits // 2
        right = bits - left
        self._right, self._left, self._more = map(np.uint64, (right, left, right - left))
        self._right_mask, self._left_mask = np.uint64((1 << right) - 1), np.uint64((1 << left) - 1)
        self._keys = words.generate_state(_ROUNDS).astype(np.uint64)

    def __call__(self, positions: Any) -> Any:
        """Return the numbers at `positions`; both are one-dimensional uint64 arrays, from 0 to n-1."""
        if self._few is not None:
            return self._few[positions]
        numbers = self._round_trip(positions)
        while (outside := np.flatnonzero(numbers >= self.n)).size:
            numbers[outside] = self._round_trip(numbers[outside])
        return numbers

    def _round_trip(self, numbers: Any) -> Any:
        high, low = numbers >> self._right, numbers & self._right_mask
        for key in self._keys:
            product = high * _MULTIPLIER  # wraps, as it does in C
            high = ((product >> np.uint64(32)) ^ key ^ low) & self._left_mask
            low = (((product & _LOW) << self._more) | (low >> self._left)) & self._right_mask
        return (high << self._right) | low


class _KeyedSampler(ComputedSampler):
    """Base class of samplers whose order can be computed from any position on.

    Args:
        count: how many indices the order has, over all replicas.
        seed, num_replicas, rank, drop_last: see `PermutationSampler`.
    """

    def __init__(self, count: int, seed: int, num_replicas: int, rank: int, drop_last: bool) -> None:
        self._count, self.seed = count, _whole("seed", seed)
        self.num_replicas, self.rank = _replica(num_replicas, rank)
        self.drop_last = drop_last

    @abstractmethod
    def _order(self) -> Callable[[_Array], _Array]:
        """The order of this epoch: a function from uint64 positions to 64-bit indices."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch: each has its own order; without this call all have the same.

        Raises:
            TypeError, ValueError: the number is not an integer of at least 0.
        """
        self.epoch = _whole("epoch", epoch)

    def __len__(self) -> int:
        """The number of indices for this replica."""
        return _part(self._count, self.num_replicas, self.drop_last)

    def iterate_from(self, position: int) -> Iterator[int]:
        """The indices of this epoch from a position on, without drawing the earlier ones."""
        for chunk in self.chunks(position, _CHUNK):
            yield from chunk.tolist()

    def chunks(self, position: int, size: int) -> Iterator[torch.Tensor]:
        order, length = self._order(), len(self)
        while position < length:
            stop = min(position + size, length)
            dealt = np.arange(position, stop, dtype=np.uint64) * np.uint64(self.num_replicas)
            numbers = order((dealt + np.uint64(self.rank)) % np.uint64(self._count))
            yield torch.from_numpy(numbers.view(np.int64))
            position = stop

    def _options(self) -> str:
        names = "seed", "num_replicas", "rank", "drop_last"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class PermutationSampler(_KeyedSampler):
    """Shuffles any number of items anew in every epoch, in constant memory.

    Replaces `RandomSampler` and `DistributedSampler` where `torch.randperm` takes seconds and gigabytes, or
    where an epoch must resume at once: the order depends only on `seed` and the epoch. Our `DataLoader`
    computes whole batches at a time.

    Args:
        n: how many items, from 0 to 2^62; the sampler yields ints from 0 to n-1.
        seed: determines the order, together with the epoch; at least 0. Each pair of a seed and an epoch has
            an order of its own.
        num_replicas: number of processes that share an epoch; the order is divided among them.
        rank: number of this process among them, from 0 on.
        drop_last: if n is not a multiple of `num_replicas`, leave items out. Otherwise the first of the order
            come twice. Both as in torch's DistributedSampler.

    Attributes:
        epoch: set by `set_epoch`; initially 0.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    >>> sampler = PermutationSampler(10**12, seed=1)
    >>> DataLoader(range(10**12), 4, sampler=sampler).sampler is sampler
    True
    >>> sorted(PermutationSampler(8, seed=1))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    set_epoch = _KeyedSampler.set_epoch  # so that the API reference shows it

    def __init__(
        self, n: int, seed: int = 0, *, num_replicas: int = 1, rank: int = 0, drop_last: bool = False
    ) -> None:
        self.n = self.population = _whole("n", n, most=1 << 62)
        super().__init__(self.n, seed, num_replicas, rank, drop_last)

    def _order(self) -> Callable[[_Array], _Array]:
        return Permutation(self.n, self.seed, self.epoch)

    def __repr__(self) -> str:
        return f"PermutationSampler(n={self.n}, {self._options()})"


class WeightedSampler(_KeyedSampler):
    """Draws items with probabilities proportional to their weights, from any number of items.

    Replaces `WeightedRandomSampler`, whose `torch.multinomial` accepts at most 2^24 items and which does not
    support ranks. The order depends only on the arguments and the epoch, so an epoch resumes exactly.

    With replacement each draw is one number below the sum of the weights, which is looked up in their
    cumulative sums: O(log n) per index, from any position on, after one pass over the weights when the
    sampler is created. An item whose share of the sum is below 2^-53 may never be drawn.

    Without replacement items are drawn one after the other from the remaining ones, by their weights, as by
    `torch.multinomial`. That is the order of the keys weight / e with e from the exponential distribution
    (algorithm A of Efraimidis, Spirakis: "Weighted random sampling with a reservoir", Information Processing
    Letters 97, 2006, in logarithms): O(n + num_samples log num_samples) at the beginning of an epoch, which
    is O(log n) per index if all are drawn.

    Args:
        weights: one-dimensional, for the items 0 to n-1: finite numbers of at least 0, not all 0. They are
            copied as float64; to change them, create another sampler.
        num_samples: how many indices an epoch has, over all replicas; at least 1.
        replacement: whether an item may be drawn again.
        seed, num_replicas, rank, drop_last: as for `PermutationSampler`. Together the replicas have the order
            of a single process.

    Attributes:
        epoch: set by `set_epoch`; initially 0.
        weights_checksum: identifies the weights in a saved state.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; without replacement
            `num_samples` is at most the number of weights above 0.

    >>> list(WeightedSampler([0.0, 3.0, 0.0], 4))
    [1, 1, 1, 1]
    >>> sorted(WeightedSampler([0.2, 0.0, 0.8], 2, replacement=False))
    [0, 2]
    """

    set_epoch = _KeyedSampler.set_epoch  # so that the API reference shows it

    def __init__(
        self,
        weights: Any,
        num_samples: int,
        replacement: bool = True,
        seed: int = 0,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        drop_last: bool = False,
    ) -> None:
        shares = _shares(weights)
        self.num_samples = _whole("num_samples", num_samples, 1, 1 << 62)
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement={replacement!r} must be True or False")
        self.replacement = replacement
        drawable = np.count_nonzero(shares)
        if not replacement and num_samples > drawable:
            raise ValueError(
                f"num_samples={num_samples} is too many for {drawable} items with a weight above 0: use "
                "fewer, or replacement=True"
            )
        super().__init__(self.num_samples, seed, num_replicas, rank, drop_last)
        self.weights_checksum = zlib.crc32(shares.tobytes())
        self._items = len(shares)
        # Summed one after the other, which gives the same result everywhere.
        self._weights = np.cumsum(shares) if replacement else shares

    def _order(self) -> Callable[[_Array], _Array]:
        return self._draw_again() if self.replacement else self._draw_once().__getitem__

    def _draw_again(self) -> Callable[[_Array], _Array]:
        sums, random = self._weights, Permutation(1 << 62, self.seed, self.epoch)

        def items(positions: _Array) -> _Array:
            # 53 of the 62 bits: the product is below the sum even after rounding.
            below = (random(positions) >> np.uint64(9)) * 2.0**-53 * sums[-1]
            found: _Array = np.searchsorted(sums, below, side="right")
            return found

        return items

    def _draw_once(self) -> _Array:
        shares, words = self._weights, np.random.Philox(seed_sequence(self.seed, self.epoch))
        keys = np.empty(len(shares))
        for start in range(0, len(keys), _CHUNK):
            part = shares[start : start + _CHUNK]
            keys[start : start + _CHUNK] = -part / _exponentials(words.random_raw(len(part)))
        keys[shares == 0] = np.inf
        last = self.num_samples - 1
        drawn = np.flatnonzero(keys <= np.partition(keys, last)[last])
        return drawn[np.argsort(keys[drawn], kind="stable")][: last + 1]

    def __repr__(self) -> str:
        return (
            f"WeightedSampler(<{self._items} weights>, num_samples={self.num_samples}, "
            f"replacement={self.replacement}, {self._options()})"
        )


def _shares(weights: Any) -> _Array:
    """Validate weights and divide them by the largest, so that their sum cannot overflow."""
    try:
        values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"weights={shorten(weights)} must be a sequence of numbers: {error}") from error
    if values.ndim != 1 or not len(values):
        raise ValueError(f"weights of shape {values.shape} must be a sequence of at least one number")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise ValueError(f"weights[{wrong[0]}]={values[wrong[0]]} must be a finite number of at least 0")
    if not (largest := values.max()):
        raise ValueError(f"weights: all {len(values)} are 0, so nothing can be drawn; give one above 0")
    return np.asarray(values / largest)


def _exponentials(words: _Array) -> _Array:
    """Exponentially distributed numbers, computed from random 64-bit words.

    Uses only operations that every processor rounds alike. The result of `np.log` depends on the processor:
    a rank on another kind of machine would have another order.
    """
    mantissas, exponents = np.frexp(((words >> np.uint64(12)) + 0.5) * 2.0**-52)
    ratios = (mantissas - 1) / (mantissas + 1)
    squares, series = ratios * ratios, np.zeros(len(words))
    for odd in range(33, 0, -2):  # log m = 2 (r + r³/3 + r⁵/5 + …), with |r| up to 1/3
        series = series * squares + 1 / odd
    return np.asarray(-(exponents * 0.6931471805599453 + 2 * ratios * series))


class Distributed(ComputedSampler):
    """Divides the order of any sampler among the processes that share an epoch.

    Each replica draws the whole order and takes every `num_replicas`-th index (or batch, of a batch sampler).
    All draw the same order, because the generators of the process (torch's, `random`, numpy's) and those that
    the sampler holds are seeded from `seed` and the epoch for the draw, and restored afterwards, so nothing
    is drawn from them. The sampler must ensure that anything else it depends on (a module's own generator,
    `secrets`, the time, its own counters) is the same on all replicas. The order is drawn at the first index,
    and must be finite.

    Generators are found among the sampler's attributes and their members, down to the third level. Unless all
    samplers are torch's or ours and nothing remained unseen, the order is drawn again with the same seeds,
    and must be the same.

    Args:
        sampler: any finite sampler. `set_epoch` calls its `set_epoch`, or that of a sampler inside it.
        seed: determines the order, together with the epoch; from 0 to 2^63 - 1.
        num_replicas, rank: number of processes that share an epoch, and number of this process. None: taken
            from torch's process group, as in torch's DistributedSampler.
        drop_last: if the length is not a multiple of `num_replicas`, leave indices out. Otherwise the first
            indices of the order come twice. Both as in DistributedSampler.

    Attributes:
        epoch: set by `set_epoch`; initially 0.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
        RuntimeError: `num_replicas` or `rank` is None, and there is no process group. When it is iterated:
            the order was drawn again, and is another one.

    >>> weighted = torch.utils.data.WeightedRandomSampler([1.0, 0.0, 3.0], num_samples=6)
    >>> ranks = [list(Distributed(weighted, num_replicas=2, rank=rank)) for rank in range(2)]
    >>> [len(rank) for rank in ranks], ranks[0] == list(Distributed(weighted, num_replicas=2, rank=0))
    ([3, 3], True)
    """

    def __init__(
        self,
        sampler: Any,
        seed: int = 0,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError(
                    f"num_replicas={num_replicas}, rank={rank}: there is no process group to take them "
                    "from. Pass both, or call torch.distributed.init_process_group() first"
                )
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not callable(getattr(sampler, "__iter__", None)):
            raise TypeError(f"sampler={sampler!r} must be a sampler, which can be iterated")
        self.sampler = sampler
        self.seed = _whole("seed", seed, most=(1 << 63) - 1)
        self.num_replicas, self.rank = _replica(num_replicas, rank)
        self.drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, here and in the sampler, if that has a `set_epoch`.

        Raises:
            TypeError, ValueError: the number is not an integer from 0 to 2^63 - 1.
        """
        self.epoch = _whole("epoch", epoch, most=(1 << 63) - 1)
        part = self.sampler
        while part is not None and not callable(getattr(part, "set_epoch", None)):
            part = getattr(part, "sampler", None)
        if part is not None:
            part.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of indices for this replica."""
        return _part(len(self.sampler), self.num_replicas, self.drop_last)

    def iterate_from(self, position: int) -> Iterator[Any]:
        own, all_seen = generators.find({"sampler": self.sampler})
        is_certain = all_seen and all(map(seeds.can_seed, own.values())) and _is_known(self.sampler)
        with generators.restored({**generators.GLOBAL, **own}):
            order = self._draw(own)
            # By chance even an order of two is the same 20 times in only one of a million epochs.
            again = 0 if is_certain else min(20, 1 + _DRAWN_AGAIN // max(1, len(order)))
            if not all(_same(order, self._draw(own)) for _ in range(again)):
                raise RuntimeError(
                    f"Distributed: {type(self.sampler).__name__} does not repeat its order with the same "
                    "seeds, so ranks would miss items. It draws from a generator that was not found or "
                    f"cannot be seeded (found: {', '.join(own) or 'none'}), or it counts its epochs by "
                    "itself. Make each generator an attribute of the sampler, or draw from a global one, and "
                    "use set_epoch()"
                )
        for at in range(position, _part(len(order), self.num_replicas, self.drop_last)):
            yield order[(at * self.num_replicas + self.rank) % len(order)]

    def _draw(self, own: dict[str, Any]) -> list[Any]:
        generators.seed_batch(self.seed, self.epoch)
        seeds.seed(own.values(), self.seed, self.epoch)
        return list(self.sampler)

    def __repr__(self) -> str:
        names = "seed", "num_replicas", "rank", "drop_last"
        return f"Distributed({self.sampler}, {', '.join(f'{name}={getattr(self, name)}' for name in names)})"


def _is_known(sampler: Any) -> bool:
    """Whether a sampler and those inside it are torch's or ours: their generators are attributes."""
    while sampler is not None:
        if not type(sampler).__module__.startswith(("torch.", "fastq_loader.")):
            return False
        sampler = getattr(sampler, "sampler", None)
    return True


def _same(order: list[Any], other: list[Any]) -> bool:
    orders = (
        [part.numpy() if isinstance(part, torch.Tensor) else part for part in each] for each in (order, other)
    )
    with contextlib.suppress(Exception):  # of a user's indices, which cannot be compared
        return generators.same(*orders)
    return False


def _part(count: int, num_replicas: int, drop_last: bool) -> int:
    """The number of indices for each replica out of `count`, as in torch's DistributedSampler."""
    return count // num_replicas if drop_last else -(-count // num_replicas)


def _replica(num_replicas: Any, rank: Any) -> tuple[int, int]:
    """Validate and return both numbers."""
    num_replicas, rank = _whole("num_replicas", num_replicas, 1), _whole("rank", rank)
    if rank >= num_replicas:
        raise ValueError(f"rank={rank} must be below num_replicas={num_replicas}")
    return num_replicas, rank


def _whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):  # numpy's integers are allowed
        raise TypeError(f"{name}={value!r} must be an int")
    number = int(value)
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={number} is too large: use at most {most}")
    return number
