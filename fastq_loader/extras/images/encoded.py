"""`encoded`: a sample that is the bytes of an image file; and a batch of them.

Runs where samples are read, and in the consumer. Importing it adds one entry to torch's table of collate
functions (`default_collate_fn_map`), so that the default collate of any DataLoader joins such samples. Both
classes are no tuples, sequences or tensors: what pins or moves a batch would take them apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from fastq_loader import api

api.sample_seeds.want()


class Encoded:
    """The bytes of one image file.

    Attributes:
        data: the bytes.
        name: the name of the file for errors; "" if it has none.
        seed: the number from which the random choices for this sample are made; 63 bits.
    """

    __slots__ = ("_batch", "data", "name", "seed")

    def __init__(self, data: Any, name: str = "", seed: int = 0) -> None:
        self.data, self.name, self.seed = data, name, seed
        self._batch = api.sample_seeds.current()  # the batch that the seed belongs to

    def seed_of_this_batch(self) -> int:
        """The seed. A sample that a dataset keeps takes a new one for each batch of this package's loader."""
        now = api.sample_seeds.current()
        if now not in (None, self._batch):
            self.seed, self._batch = api.sample_seeds.take(), now
        return self.seed

    def __len__(self) -> int:
        """Number of bytes."""
        return len(self.data)

    def __getstate__(self) -> tuple[bytes, str, int]:
        return bytes(self.data), self.name, self.seed

    def __setstate__(self, state: tuple[bytes, str, int]) -> None:
        self.data, self.name, self.seed = state
        self._batch = api.sample_seeds.current()
        if api.sample_seeds.reading.renews:
            self.seed = api.sample_seeds.take()

    def __repr__(self) -> str:
        return f"Encoded({self.name!r}, {len(self)} bytes)"


def encoded(source: str | os.PathLike[str] | Any, name: str | None = None) -> Encoded:
    """A sample: the bytes of an image file, undecoded.

    `DecodeImages` turns it into pixels, in the worker or later. A batch of them is one `EncodedBatch`.

    Its random choices (crop, flip) belong to the sample: they are made from a seed that is mixed from the
    base seed of the epoch, the epoch's number, the batch's number and the position in it. So they are the
    same for any number of workers, any schedule, a restarted worker, a replay and a resumed epoch. A second
    `encoded` of the same sample has a seed of its own. Of an iterable dataset they are the same for one
    number of workers. Outside of this package's loader, and in threads that the dataset starts, it is drawn
    from torch's global generator.

    Args:
        source: path of the file; or its contents as bytes, bytearray, memoryview, or a uint8 array or
            tensor of one dimension.
        name: the name for errors; by default the path.

    Raises:
        OSError: the file cannot be read.
        TypeError: `source` is neither a path nor bytes.

    >>> encoded(b"...", name="photo")
    Encoded('photo', 3 bytes)
    """
    if isinstance(source, (str, os.PathLike)):
        data: Any = Path(source).read_bytes()
        name = os.fspath(source) if name is None else name
    elif isinstance(source, (bytes, bytearray, memoryview)):
        data = source
    elif isinstance(source, (np.ndarray, torch.Tensor)):
        data = _bytes_of(source)
    else:
        kind = type(source).__name__
        raise TypeError(f"encoded(source={kind}): give the path of a file, or its contents as bytes")
    return Encoded(data, name or "", api.sample_seeds.take())


def _bytes_of(source: np.ndarray[Any, Any] | torch.Tensor) -> Any:
    """The bytes of an array, without a copy. Raises TypeError."""
    array: Any = np.asarray(source)
    if array.dtype != np.uint8 or array.ndim != 1:
        found = f"{array.dtype} of shape {array.shape}"
        text = f"encoded(source={found}): the contents of a file are uint8, of shape (n,)"
        raise TypeError(text)
    return np.ascontiguousarray(array).data


class EncodedBatch:
    """The files of a batch: their bytes one after the other, in one buffer.

    It stays on the host: `to` returns the batch itself, and a loader with `device=` copies none of its bytes
    to the device, because they are arrays.

    Attributes:
        data: array of uint8, shape (total bytes,).
        offsets: array of int64, shape (N + 1,): file i is `data[offsets[i]:offsets[i + 1]]`.
        names: name of each file.
        seeds: seed of each file.
    """

    __slots__ = ("data", "names", "offsets", "seeds")

    def __init__(
        self,
        data: np.ndarray[Any, Any],
        offsets: np.ndarray[Any, Any],
        names: Sequence[str],
        seeds: Sequence[int],
    ) -> None:
        self.data, self.offsets = data, offsets
        self.names, self.seeds = tuple(names), tuple(seeds)

    def __len__(self) -> int:
        """Number of files."""
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedBatch: ...
    def __getitem__(self, index: int | slice) -> Encoded | EncodedBatch:
        """One file, whose bytes are a view of the batch's; or some of the files, with a copy of theirs."""
        if isinstance(index, slice):
            return joined([self[i] for i in range(*index.indices(len(self)))])
        number = range(len(self))[index]
        begin, end = self.offsets[number : number + 2]
        return Encoded(self.data[begin:end].data, self.names[number], self.seeds[number])

    def __iter__(self) -> Iterator[Encoded]:
        return map(self.__getitem__, range(len(self)))

    def pin_memory(self, device: Any = None) -> EncodedBatch:
        """The batch itself: the decoder reads ordinary memory."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> EncodedBatch:
        """The batch itself, which stays on the host."""
        return self

    def __getstate__(self) -> tuple[Any, ...]:
        return self.data, self.offsets, self.names, self.seeds

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.data, self.offsets, self.names, self.seeds = state

    def __repr__(self) -> str:
        return f"EncodedBatch({len(self)} files, {self.data.nbytes} bytes)"


def joined(samples: Sequence[Encoded], *, collate_fn_map: Any = None) -> EncodedBatch:
    """The files of a batch in one buffer; in a worker it lies in shared memory.

    Args:
        samples: the files, in their order.
        collate_fn_map: part of torch's interface for collate functions; unused.
    """
    offsets = np.zeros(len(samples) + 1, np.int64)
    np.cumsum([len(sample) for sample in samples], out=offsets[1:])
    data = api.allocator.empty((int(offsets[-1]),), dtype=torch.uint8).numpy()
    for sample, begin, end in zip(samples, offsets, offsets[1:], strict=False):
        data[begin:end] = np.frombuffer(sample.data, np.uint8)
    names, seeds = [sample.name for sample in samples], [sample.seed_of_this_batch() for sample in samples]
    return EncodedBatch(data, offsets, names, seeds)


default_collate_fn_map[Encoded] = joined
