"""`encoded`: a sample that is the bytes of an image file; and a batch of them.

Runs where samples are read, and in the consumer. Importing it adds one entry to torch's table of collate
functions (`default_collate_fn_map`), so that the default collate of any DataLoader joins such samples. Both
classes are neither tuples, nor sequences, nor tensors: code that pins or moves a batch would take them apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from fastq_loader.extras.images import sample_seeds
from fastq_loader.extras.images.crops import another
from fastq_loader.extras.images.decoders import Header, read_header
from fastq_loader.memory import allocator

Ints = np.ndarray[Any, Any]

#: The formats of buffers of bytes: unsigned, signed, characters, and numpy's "S1".
_BYTES = "Bbcs"


class Encoded:
    """The bytes of one image file.

    Attributes:
        data: the bytes.
        name: the name of the file for errors; "" if it has none.
        seed: the number from which the next random choices for this sample are made; 63 bits.
        header: its size in pixels, and the kind of file.
        place: the sample that the seed belongs to; see `sample_seeds.place`.

    Raises:
        DecodeError, ImportError: see `encoded`.
    """

    __slots__ = ("data", "header", "name", "place", "seed")
    _not_compared = ("place", "seed")  # by `compare`

    def __init__(self, data: Any, name: str = "", seed: int = 0, header: Header | None = None) -> None:
        self.data, self.name, self.seed = data, name, seed
        self.header = header or read_header(data, name)
        self.place = sample_seeds.place()

    def seed_of_this_batch(self, renews: bool = False) -> int:
        """The seed. A sample that a dataset keeps takes a new one for each batch of this package's loader.

        Args:
            renews: whether it takes a new one in any case.
        """
        now = sample_seeds.place()
        if renews or (now is not None and now[:-1] != (self.place or ())[:-1]):
            self.seed, self.place = sample_seeds.take(), now
        return self.seed

    def seeds_of_this_batch(self) -> list[int]:
        return [self.seed_of_this_batch()]

    def advance(self) -> None:
        """From now on, other random choices are made for this sample, which another call may decode again."""
        self.seed = another(self.seed, views=1)

    def __len__(self) -> int:
        """Number of bytes."""
        return len(self.data)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same file, whatever its random choices."""
        return isinstance(other, Encoded) and (self.data, self.name) == (other.data, other.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def __getstate__(self) -> tuple[Any, ...]:
        return bytes(self.data), self.name, self.seed, self.header, self.place

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.data, self.name, self.seed, self.header, self.place = state
        self.seed_of_this_batch(sample_seeds.reading.renews)  # here the sample's position is known


def encoded(source: str | os.PathLike[str] | Any, name: str | None = None) -> Encoded:
    """A sample: the bytes of an image file, undecoded.

    `DecodeImages` turns it into pixels, in the worker or later. A batch of them is one `EncodedBatch`.

    Its random choices (crop, flip) belong to the sample: they are made from a seed that is mixed from the
    base seed of the epoch, the epoch's number, the batch's number and the position in it. So they are the
    same for any number of workers, any schedule, a restarted worker, a replay and a resumed epoch. A second
    `encoded` of the same sample has a seed of its own. Of an iterable dataset they are the same for one
    number of workers. Outside of this package's loader, and in threads that the dataset starts, it is drawn
    from torch's global generator. If `DecodeImages` decodes a sample twice, the second result has other
    crops, and they are the same in all these cases, too.

    Args:
        source: path of the file; or its contents as bytes; or another buffer of bytes, which is copied (such
            as a bytearray, a memoryview, a mapped file, a buffer of pyarrow's, or a uint8 array or tensor of
            one dimension).
        name: the name for errors; by default the path.

    The header of the file is read, so that `errors=` of the loader applies to a file without a valid one. A
    file that is damaged behind its header raises where it is decoded.

    Raises:
        OSError: the file cannot be read.
        DecodeError: it is no image, or has more pixels than `PIL.Image.MAX_IMAGE_PIXELS` allows.
        TypeError: `source` is neither a path nor bytes.
        ImportError: pillow is not installed.

    >>> encoded(b"...", name="photo")
    Traceback (most recent call last):
    DecodeError: photo cannot be decoded: it is no image that pillow knows
    """
    is_path = isinstance(source, (str, os.PathLike))
    data = Path(source).read_bytes() if is_path else _bytes_of(source)
    name = (os.fspath(source) if is_path else "") if name is None else name
    return Encoded(data, name, sample_seeds.take())  # a broken file takes one, too


def _bytes_of(source: Any) -> bytes:
    """The contents of a file: a copy of what may change, or be closed. Raises TypeError."""
    if isinstance(source, bytes):
        return source
    with suppress(TypeError):
        given = cast(Any, source.numpy()) if isinstance(source, torch.Tensor) else source
        with memoryview(given) as view:
            if view.itemsize == view.ndim == 1 and str(view.format)[-1] in _BYTES:
                return view.tobytes()
    raise TypeError(f"encoded(source={type(source).__name__}): give a path, bytes, or uint8 of shape (n,)")


class EncodedBatch:
    """The files of a batch: their bytes one after the other, in one buffer.

    It stays on the host: `to` returns the batch itself, and a loader with `device=` copies none of its bytes
    to the device, because they are arrays.

    Attributes:
        data: array of uint8, shape (total bytes,).
        offsets: array of int64, shape (N + 1,): file i is `data[offsets[i]:offsets[i + 1]]`.
        names: name of each file.
        seeds: array of int64, shape (N,): seed of the next random choices for each file.
        headers: array of int64, shape (N, 3): height, width and kind of each file.
    """

    __slots__ = ("data", "headers", "names", "offsets", "seeds")
    _not_compared = ("seeds",)  # by `compare`

    def __init__(self, data: Ints, offsets: Ints, names: tuple[str, ...], seeds: Ints, headers: Ints) -> None:
        self.data, self.offsets, self.names, self.seeds, self.headers = data, offsets, names, seeds, headers

    def __len__(self) -> int:
        """Number of files."""
        return len(self.names)

    def __getitem__(self, index: int | slice) -> Any:
        """One file, whose bytes are a view of the batch's; or some of the files, with a copy of theirs."""
        if isinstance(index, slice):
            return joined([self[i] for i in range(*index.indices(len(self)))])
        number = range(len(self))[index]
        begin, end = self.offsets[number : number + 2]
        header = Header(*self.headers[number].tolist())
        return Encoded(self.data[begin:end].data, self.names[number], int(self.seeds[number]), header)

    def __iter__(self) -> Iterator[Encoded]:
        return map(self.__getitem__, range(len(self)))

    def seeds_of_this_batch(self) -> list[int]:
        seeds: list[int] = self.seeds.tolist()
        return seeds

    def advance(self) -> None:
        """As `Encoded.advance`."""
        self.seeds = another(self.seeds, views=1)

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
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    data = allocator.empty((int(offsets[-1]),), dtype=torch.uint8).numpy()
    for sample, begin, end in zip(samples, offsets, offsets[1:], strict=False):
        data[begin:end] = np.frombuffer(sample.data, np.uint8)
    seeds = np.array([sample.seed_of_this_batch() for sample in samples], np.int64)
    for sample in samples:  # which may be another part of its sample, too
        sample.seed = another(sample.seed, parts=1)
    sizes = np.array([sample.header for sample in samples], np.int64).reshape(-1, 3)
    return EncodedBatch(data, offsets, tuple(sample.name for sample in samples), seeds, sizes)


default_collate_fn_map[Encoded] = joined
