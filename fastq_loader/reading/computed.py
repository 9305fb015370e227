"""Samplers whose order is computed from a seed and the epoch: a shuffle, a draw by weights, and the part that
a rank has of any other sampler's order.

Runs in the consumer, on the thread that calls `next()`. Nothing is drawn from the generators of the process.
A keyed permutation gives the item of a shuffle at any position by itself, and the random number behind a draw
by weights. So these orders take no memory of their own, begin at once and go on from any position, on any
rank; only a draw without replacement is sorted when an epoch begins. All bits are the same on every machine.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from fastq_loader.errors import shorten
from fastq_loader.reading import generators

_Array = np.ndarray[Any, np.dtype[Any]]

#: Indices that are computed at a time; more are no quicker.
CHUNK = 8192

_ROUNDS = 24
#: So many numbers take less time to sort than the network takes to be set up.
_FEW = 1024
_MULTIPLIER = np.uint64(0xD2B74407B1CE6E93)
_LOW = np.uint64(0xFFFFFFFF)


class Permutation:
    """A permutation of the numbers from 0 to n-1, drawn by a key.

    VariablePhilox with 24 rounds (Mitchell, Stokes, Frank, Holmes: "Bandwidth-Optimal Random Shuffling for
    GPUs", ACM Transactions on Parallel Computing 9, 2022), which Thrust's `shuffle` uses: an unbalanced
    Feistel network over as many bits as n needs. A number of n or more is put through it
    again, until it is below n (cycle walking; Black, Rogaway: "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002), which is less than twice on average. Such a network gives even permutations of its 2^bits
    numbers only, and on 4 bits not all of them alike: a few numbers are sorted by random words instead.

    Args:
        n: how many numbers, from 0 to 2^62.
        key: non-negative integers.
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        words = np.random.SeedSequence(key)
        self._few = np.argsort(words.generate_state(n, np.uint64)).astype(np.uint64) if n <= _FEW else None
        bits = max(2, (n - 1).bit_length())
        left = bits // 2
        right = bits - left
        self._right, self._left, self._more = map(np.uint64, (right, left, right - left))
        self._right_mask, self._left_mask = np.uint64((1 << right) - 1), np.uint64((1 << left) - 1)
        self._keys = words.generate_state(_ROUNDS).astype(np.uint64)

    def __call__(self, positions: Any) -> Any:
        """The numbers at these positions: both uint64 arrays of one dimension, from 0 to n-1."""
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


class ComputedSampler(Sampler[int]):
    """Base class of samplers whose whole order can be computed from any position on.

    Args:
        count: how many indices the order has, for all replicas together.
        seed, num_replicas, rank, drop_last: see `PermutationSampler`.
    """

    def __init__(self, count: int, seed: int, num_replicas: int, rank: int, drop_last: bool) -> None:
        self._count, self.seed = count, _whole("seed", seed)
        self.num_replicas, self.rank = _replica(num_replicas, rank)
        self.drop_last = drop_last
        self.epoch = 0

    @abstractmethod
    def _order(self) -> Callable[[_Array], _Array]:
        """The order of this epoch: from uint64 positions to indices, of 64 bits each."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next: each has an order of its own. Without it all have the same.

        Raises:
            TypeError, ValueError: it is not a number of at least 0.
        """
        self.epoch = _whole("epoch", epoch)

    def __len__(self) -> int:
        """How many indices this replica gets."""
        return _part(self._count, self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """The indices of this epoch from a position on, at once."""
        for chunk in self.chunks(position, CHUNK):
            yield from chunk.tolist()

    def chunks(self, position: int, size: int) -> Iterator[torch.Tensor]:
        """The same as int64 tensors of shape (`size`,); the last one may be shorter."""
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


class PermutationSampler(ComputedSampler):
    """Shuffles any number of items anew in every epoch, in memory of constant size.

    Takes the place of `RandomSampler` and `DistributedSampler` where `torch.randperm` takes seconds and
    gigabytes, and of either where an epoch is to be resumed at once: the order follows from `seed` and the
    epoch alone. With a `DataLoader` of ours whole batches are computed at a time.

    Args:
        n: how many items, from 0 to 2^62; the sampler yields ints from 0 to n-1.
        seed: decides on the order, with the epoch; at least 0.
        num_replicas: processes that share an epoch; the order is dealt out to them.
        rank: which of them this one is.
        drop_last: if n is not a multiple of `num_replicas`, leave items out. Else the first of the order come
            twice. Both as in torch's DistributedSampler.

    Attributes:
        epoch: set by `set_epoch`; 0 at first.

    Raises:
        TypeError, ValueError: an argument is no such number.

    >>> sampler = PermutationSampler(10**12, seed=1)
    >>> DataLoader(range(10**12), 4, sampler=sampler).sampler is sampler
    True
    >>> sorted(PermutationSampler(8, seed=1))
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    set_epoch = ComputedSampler.set_epoch  # which the reference shows

    def __init__(
        self, n: int, seed: int = 0, *, num_replicas: int = 1, rank: int = 0, drop_last: bool = False
    ) -> None:
        self.n = _whole("n", n, most=1 << 62)
        super().__init__(self.n, seed, num_replicas, rank, drop_last)

    def _order(self) -> Callable[[_Array], _Array]:
        return Permutation(self.n, self.seed, self.epoch)

    def __repr__(self) -> str:
        return f"PermutationSampler(n={self.n}, {self._options()})"


class WeightedSampler(ComputedSampler):
    """Draws items with probabilities in proportion to their weights, from any number of items.

    Takes the place of `WeightedRandomSampler`, whose `torch.multinomial` takes 2^24 items at most, and which
    knows no ranks. The order follows from the arguments and the epoch alone, so an epoch is resumed exactly.

    With replacement each draw is one number below the sum of the weights, which is found in their cumulative
    sums: O(log n) for each index, from any position on, after one pass over the weights when the sampler is
    made. An item whose part of the sum is below 2^-53 may never come.

    Without replacement an item is drawn among those that are left, by their weights, one after the other, as
    by `torch.multinomial`. That is the order of the keys weight / e with e from the exponential distribution
    (algorithm A of Efraimidis, Spirakis: "Weighted random sampling with a reservoir", Information Processing
    Letters 97, 2006, in logarithms): O(n + num_samples log num_samples) at the beginning of an epoch, which
    is O(log n) for each index where all are drawn.

    Args:
        weights: of the items 0 to n-1: finite numbers of at least 0, not all 0, of one dimension. They are
            copied, as float64: for others make another sampler.
        num_samples: how many indices an epoch has, for all replicas together; at least 1.
        replacement: whether an item may be drawn again.
        seed, num_replicas, rank, drop_last: as for `PermutationSampler`. Together the replicas have the order
            that one alone would have.

    Attributes:
        epoch: set by `set_epoch`; 0 at first.
        weights_checksum: by which a saved state knows the weights.

    Raises:
        TypeError, ValueError: an argument is no such value, or fewer items than `num_samples` have a weight
            above 0, without replacement.

    >>> list(WeightedSampler([0.0, 3.0, 0.0], 4))
    [1, 1, 1, 1]
    >>> sorted(WeightedSampler([0.2, 0.0, 0.8], 2, replacement=False))
    [0, 2]
    """

    set_epoch = ComputedSampler.set_epoch  # which the reference shows

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
        # Added up one after the other, which is the same everywhere.
        self._weights = np.cumsum(shares) if replacement else shares

    def _order(self) -> Callable[[_Array], _Array]:
        return self._draw_again() if self.replacement else self._draw_once().__getitem__

    def _draw_again(self) -> Callable[[_Array], _Array]:
        sums, random = self._weights, Permutation(1 << 62, self.seed, self.epoch)

        def items(positions: _Array) -> _Array:
            # 53 bits of 62: the product is below the sum also when it is rounded.
            below = (random(positions) >> np.uint64(9)) * 2.0**-53 * sums[-1]
            found: _Array = np.searchsorted(sums, below, side="right")
            return found

        return items

    def _draw_once(self) -> _Array:
        shares, words = self._weights, np.random.Philox(np.random.SeedSequence((self.seed, self.epoch)))
        keys = np.empty(len(shares))
        for start in range(0, len(keys), CHUNK):
            part = shares[start : start + CHUNK]
            keys[start : start + CHUNK] = -part / _exponentials(words.random_raw(len(part)))
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
    """Weights as parts of the largest, so that no sum of them is too large."""
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
    """Numbers of the exponential distribution, of random 64-bit words.

    By operations whose results every processor rounds alike. That of `np.log` depends on the processor: a
    rank on another kind of machine would have another order.
    """
    mantissas, exponents = np.frexp(((words >> np.uint64(12)) + 0.5) * 2.0**-52)
    ratios = (mantissas - 1) / (mantissas + 1)
    squares, series = ratios * ratios, np.zeros(len(words))
    for odd in range(33, 0, -2):  # log m = 2 (r + r³/3 + r⁵/5 + …), with |r| up to 1/3
        series = series * squares + 1 / odd
    return np.asarray(-(exponents * 0.6931471805599453 + 2 * ratios * series))


class Distributed(Sampler[Any]):
    """Deals out the order of any sampler to the processes that share an epoch.

    Each replica draws the whole order and takes every `num_replicas`-th index of it, or every such batch of a
    batch sampler. It is the same order for all of them, because it is drawn while the generators of the
    process (torch's, `random`, numpy's), and those that the sampler has as attributes, are seeded from `seed`
    and the epoch; after that they are put back, so nothing is drawn from them. What a sampler draws from
    anywhere else (a module's own generator, `secrets`, the time), or counts by itself, must be the same on
    all replicas by its own care. The order is drawn at the first index, and must end.

    Args:
        sampler: any that ends. Its `set_epoch`, or that of a sampler in it, is called by the one here.
        seed: decides on the order, with the epoch; from 0 to 2^63 - 1.
        num_replicas, rank: processes that share an epoch, and which of them this one is. None: those of
            torch's process group, as in torch's DistributedSampler.
        drop_last: if the length is not a multiple of `num_replicas`, leave indices out. Else the first of the
            order come twice. Both as there.

    Attributes:
        epoch: set by `set_epoch`; 0 at first.

    Raises:
        TypeError, ValueError: an argument is no such value.
        RuntimeError: a number is None, and there is no process group.

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
                    f"num_replicas={num_replicas}, rank={rank}: there is no process group that could say "
                    "them. Give both, or call torch.distributed.init_process_group() before"
                )
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not callable(getattr(sampler, "__iter__", None)):
            raise TypeError(f"sampler={sampler!r} must be a sampler, which can be iterated")
        self.sampler = sampler
        self.seed = _whole("seed", seed, most=(1 << 63) - 1)
        self.num_replicas, self.rank = _replica(num_replicas, rank)
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, here and to the sampler, if it wants to know.

        Raises:
            TypeError, ValueError: it is not a number of at least 0.
        """
        self.epoch = _whole("epoch", epoch)
        part = self.sampler
        while part is not None and not callable(getattr(part, "set_epoch", None)):
            part = getattr(part, "sampler", None)
        if part is not None:
            part.set_epoch(epoch)

    def __len__(self) -> int:
        """How many indices this replica gets."""
        return _part(len(self.sampler), self.num_replicas, self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        own = generators.find({"sampler": self.sampler})
        with generators.restored([*generators.GLOBAL.values(), *own.values()]):
            generators.seed_batch(self.seed, self.epoch, own)
            order = list(self.sampler)
        for position in range(_part(len(order), self.num_replicas, self.drop_last)):
            yield order[(position * self.num_replicas + self.rank) % len(order)]

    def __repr__(self) -> str:
        names = "seed", "num_replicas", "rank", "drop_last"
        return f"Distributed({self.sampler}, {', '.join(f'{name}={getattr(self, name)}' for name in names)})"


def _part(count: int, num_replicas: int, drop_last: bool) -> int:
    """How many of so many indices each replica gets, as with torch's DistributedSampler."""
    return count // num_replicas if drop_last else -(-count // num_replicas)


def _replica(num_replicas: Any, rank: Any) -> tuple[int, int]:
    """Both numbers, checked."""
    num_replicas, rank = _whole("num_replicas", num_replicas, 1), _whole("rank", rank)
    if rank >= num_replicas:
        raise ValueError(f"rank={rank} must be below num_replicas={num_replicas}")
    return num_replicas, rank


def _whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):  # numpy's integers are some, too
        raise TypeError(f"{name}={value!r} must be an int")
    number = int(value)
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={number} is too large: use at most {most}")
    return number
