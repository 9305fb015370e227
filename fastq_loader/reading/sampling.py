"""The indices of an epoch: the sampler's own, drawn in whole batches where that gives the same, and a shuffle
that is computed and not stored.

Runs in the consumer, on the thread that calls `next()`. torch's BatchSampler over its RandomSampler hands
4096 integers through two generators one by one, which takes longer than a batch of a vectorised dataset.
Here the same permutation is cut into batches: the same draws from the same generator at the same moments.

`PermutationSampler` draws nothing: a keyed permutation gives the item at any position by itself. So a shuffle
of any number of items takes no memory, begins at once and goes on from any position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from fastq_loader.ipc.messages import Indices

T = TypeVar("T")
_Array = np.ndarray[Any, np.dtype[np.int64]]

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


class PermutationSampler(Sampler[int]):
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

    def __init__(
        self, n: int, seed: int = 0, *, num_replicas: int = 1, rank: int = 0, drop_last: bool = False
    ) -> None:
        self.n, self.seed, self.rank = _whole("n", n), _whole("seed", seed), _whole("rank", rank)
        self.num_replicas = _whole("num_replicas", num_replicas, 1)
        if n > 1 << 62:
            raise ValueError(f"n={n} is too large: use at most 2^62")
        if rank >= num_replicas:
            raise ValueError(f"rank={rank} must be below num_replicas={num_replicas}")
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next: each has an order of its own. Without it all have the same.

        Raises:
            TypeError, ValueError: it is not a number of at least 0.
        """
        self.epoch = _whole("epoch", epoch)

    def __len__(self) -> int:
        """How many indices this replica gets."""
        if self.drop_last:
            return self.n // self.num_replicas
        return -(-self.n // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """The indices of this epoch from a position on, at once."""
        for chunk in self.chunks(position, CHUNK):
            yield from chunk.tolist()

    def chunks(self, position: int, size: int) -> Iterator[torch.Tensor]:
        """The same as int64 tensors of shape (`size`,); the last one may be shorter."""
        permutation, length = Permutation(self.n, self.seed, self.epoch), len(self)
        while position < length:
            stop = min(position + size, length)
            dealt = np.arange(position, stop, dtype=np.uint64) * np.uint64(self.num_replicas)
            numbers = permutation((dealt + np.uint64(self.rank)) % np.uint64(self.n))
            yield torch.from_numpy(numbers.view(np.int64))
            position = stop

    def __repr__(self) -> str:
        return (
            f"PermutationSampler(n={self.n}, seed={self.seed}, num_replicas={self.num_replicas}, "
            f"rank={self.rank}, drop_last={self.drop_last})"
        )


def _whole(name: str, value: Any, least: int = 0) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):  # numpy's integers are some, too
        raise TypeError(f"{name}={value!r} must be an int")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return int(value)


def iterate_from(
    index_sampler: Any, skip: int, *, packed: bool = False, note: Callable[[torch.Tensor], Any] = id
) -> tuple[Iterator[Any], int]:
    """`iter(index_sampler)` without the first `skip` indices, where they need not be drawn one by one; faster
    where the sampler is torch's own shuffle, or ours.

    A subclass may mean something else, and so may a class whose `__iter__` was replaced: those, and every
    other sampler, are iterated as they are.

    Args:
        index_sampler: yields indices, or lists of them.
        skip: so many.
        packed: give a batch of a shuffle as `Indices`, as it goes into a message.
        note: called with each permutation of a shuffle.

    Returns:
        The indices, and how many of them have still to be skipped.
    """
    form = _packed if packed else np.ndarray.tolist
    if is_shuffle(index_sampler):
        return _shuffled(index_sampler, form, skip, note), 0
    if type(index_sampler) is PermutationSampler:
        return index_sampler.iterate_from(skip), 0
    if _cuts(index_sampler, PermutationSampler):
        return _permuted(index_sampler, form, skip), 0
    return iter(index_sampler), skip


def _packed(indices: _Array) -> Indices:
    # As `Indices()`, and quicker.
    return tuple.__new__(Indices, (indices.tobytes(),))


def _cuts(index_sampler: Any, sampler: type) -> bool:
    """Whether it is torch's own BatchSampler over just this sampler."""
    return (
        type(index_sampler) is BatchSampler
        and type(index_sampler.sampler) is sampler
        and BatchSampler.__iter__.__module__ == BatchSampler.__module__
    )


def is_shuffle(index_sampler: Any) -> bool:
    """Whether it is torch's own shuffle, in batches."""
    return (
        _cuts(index_sampler, RandomSampler)
        and not index_sampler.sampler.replacement
        and RandomSampler.__iter__.__module__ == RandomSampler.__module__
    )


def _permuted(index_sampler: BatchSampler, form: Callable[[_Array], T], skip: int) -> Iterator[T]:
    size, sampler = index_sampler.batch_size, index_sampler.sampler
    assert isinstance(sampler, PermutationSampler)
    for chunk in sampler.chunks(skip * size, size * max(1, CHUNK // size)):
        indices = chunk.numpy()
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            if len(batch) == size or not index_sampler.drop_last:
                yield form(batch)


def _shuffled(
    index_sampler: BatchSampler, form: Callable[[_Array], T], skip: int, note: Callable[..., Any]
) -> Iterator[T]:
    drop_last, size = index_sampler.drop_last, index_sampler.batch_size
    permutations = _permutations(index_sampler.sampler)  # type: ignore[arg-type]
    # Cut as an array: a slice of a tensor takes ten times as long.
    indices, start, to_pass = np.empty(0, np.int64), 0, skip * size
    while True:
        while start + size > len(indices):
            following = next(permutations, None)
            if following is None:
                if start < len(indices) and not drop_last:
                    yield form(indices[start:])
                return
            note(new := following.cpu().numpy())
            indices = (
                np.concatenate((indices[start:], new[to_pass:])) if start < len(indices) else new[to_pass:]
            )
            start, to_pass = 0, max(0, to_pass - len(new))
        yield form(indices[start : start + size])
        start += size
        if not drop_last:
            size = index_sampler.batch_size  # torch asks for it again before every batch


def _permutations(sampler: RandomSampler) -> Iterator[torch.Tensor]:
    """The generator that RandomSampler draws from; torch 2.6 to 2.13 draw like this."""
    count = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // count):
        yield torch.randperm(count, generator=generator)
    yield torch.randperm(count, generator=generator)[: sampler.num_samples % count]
