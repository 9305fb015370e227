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
from fastq_loader.extras.images import headers
from fastq_loader.extras.images.headers import Header

api.sample_seeds.want()


class Encoded:
    """The bytes of one image file.

    Attributes:
        data: the bytes.
        name: the name of the file for errors; "" if it has none.
        seed: the number from which the random choices for this sample are made; 63 bits.
    """

    __slots__ = ("_batch", "_header", "data", "name", "seed")

    def __init__(self, data: Any, name: str = "", seed: int = 0, header: Header | None = None) -> None:
        self.data, self.name, self.seed, self._header = data, name, seed, header
        self._batch = api.sample_seeds.current()  # the batch that the seed belongs to

    @property
    def header(self) -> Header:
        """Its size in pixels, and the kind of file. Raises DecodeError, ImportError."""
        if self._header is None:
            self._header = headers.read(self.data, self.name)
        return self._header

    def seed_of_this_batch(self) -> int:
        """The seed. A sample that a dataset keeps takes a new one for each batch of this package's loader."""
        now = api.sample_seeds.current()
        if now not in (None, self._batch):
            self.seed, self._batch = api.sample_seeds.take(), now
        return self.seed

    def __len__(self) -> int:
        """Number of bytes."""
        return len(self.data)

    def __getstate__(self) -> tuple[Any, ...]:
        return bytes(self.data), self.name, self.seed, self._header

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.data, self.name, self.seed, self._header = state
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

    The header of the file is read, so that `errors=` of the loader applies to a file without a valid one. A
    file that is damaged behind its header raises where it is decoded.

    Raises:
        OSError: the file cannot be read.
        DecodeError: it is no image, or has more pixels than `PIL.Image.MAX_IMAGE_PIXELS` allows.
        TypeError: `source` is neither a path nor bytes.
        ImportError: the file is no JPEG, and pillow is not installed.

    >>> encoded(b"...", name="photo")
    Traceback (most recent call last):
    DecodeError: photo cannot be decoded: it is no image that pillow knows
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
    seed = api.sample_seeds.take()  # first: a broken file takes one, too
    return Encoded(data, name or "", seed, headers.read(data, name or ""))


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
        headers: array of int64, shape (N, 3): height, width and kind of each file.
    """

    __slots__ = ("_seeds", "data", "headers", "names", "offsets")

    def __init__(
        self,
        data: np.ndarray[Any, Any],
        offsets: np.ndarray[Any, Any],
        names: Sequence[str],
        seeds: Sequence[int],
        headers: np.ndarray[Any, Any],
    ) -> None:
        self.data, self.offsets, self.headers = data, offsets, headers
        self.names, self._seeds = (
            tuple(names),
            np.array(seeds, np.int64),
        )  # less to look through than integers

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each file."""
        return tuple(self._seeds.tolist())

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
        header = Header(*self.headers[number].tolist())
        return Encoded(self.data[begin:end].data, self.names[number], int(self._seeds[number]), header)

    def __iter__(self) -> Iterator[Encoded]:
        return map(self.__getitem__, range(len(self)))

    def pin_memory(self, device: Any = None) -> EncodedBatch:
        """The batch itself: the decoder reads ordinary memory."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> EncodedBatch:
        """The batch itself, which stays on the host."""
        return self

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
    return EncodedBatch(data, offsets, names, seeds, np.array([sample.header for sample in samples]))


default_collate_fn_map[Encoded] = joined
