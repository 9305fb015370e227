"""Files in the formats that people keep their samples in, and datasets that read them as their docs say.

What cannot be shared among processes (handles, memory maps, environments) is opened in the worker, when its
first sample is asked for. A row is the same in every format: an image of 16x16x3 bytes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ChainDataset, Dataset

ROWS = 8
Reader = Callable[[int], Any]

if (
    torch.version.cuda is None
    and importlib.util.find_spec("torchvision") is not None
    and "+" not in importlib.metadata.version("torchvision")
):  # It was built for CUDA, and none of its operators can be loaded here. Its import asks for these two.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor")


def images() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(0, 256, (ROWS, 16, 16, 3), np.uint8)


def write_h5py(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("images", data=images(), chunks=(2, 16, 16, 3), compression="gzip")


def open_h5py(folder: Path) -> Reader:
    import h5py

    file = h5py.File(folder / "a.h5")
    return lambda row: file["images"][row]


def write_lmdb(folder: Path) -> None:
    import lmdb

    with lmdb.open(f"{folder}/lmdb") as environment, environment.begin(write=True) as transaction:
        for row, image in enumerate(images()):
            transaction.put(b"%d" % row, image.tobytes())


def open_lmdb(folder: Path) -> Reader:
    import lmdb

    environment = lmdb.open(f"{folder}/lmdb", readonly=True, lock=False)

    def read(row: int) -> Any:
        with environment.begin(buffers=True) as transaction:
            return np.frombuffer(transaction.get(b"%d" % row), np.uint8).reshape(16, 16, 3).copy()

    return read


def write_memmap(folder: Path) -> None:
    np.save(folder / "a.npy", images())


def open_memmap(folder: Path) -> Reader:
    mapped = np.load(folder / "a.npy", mmap_mode="r")
    return lambda row: mapped[row].copy()


def write_arrow(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"image": list(images().reshape(ROWS, -1))})
    pyarrow.parquet.write_table(table, folder / "arrow", row_group_size=2)


def open_arrow(folder: Path) -> Reader:
    import pyarrow.dataset

    dataset = pyarrow.dataset.dataset(folder / "arrow")
    return lambda row: np.stack(dataset.take([row])["image"].to_numpy())[0].reshape(16, 16, 3)


def write_png(folder: Path) -> None:
    from PIL import Image

    for row, image in enumerate(images()):
        Image.fromarray(image).save(folder / f"{row}.png")


def open_torchvision(folder: Path) -> Reader:
    """A crop and a flip, drawn from torch's generator; the type of the tensor is torchvision's."""
    from PIL import Image
    from torchvision.transforms import v2

    steps = v2.Compose(
        [v2.ToImage(), v2.RandomResizedCrop(8), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float)]
    )
    return lambda row: steps(Image.open(folder / f"{row}.png"))


def write_webdataset(folder: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(f"{folder}/%d.tar", maxcount=4, verbose=0) as shards:
        for row, image in enumerate(images()):
            shards.write({"__key__": f"{row}", "png": image, "cls": row})


def open_webdataset(folder: Path) -> Any:
    import webdataset

    shards = [f"{folder}/{number}.tar" for number in range(ROWS // 4)]
    return webdataset.WebDataset(shards, shardshuffle=False).decode("torchrgb8").to_tuple("png", "cls")


def write_streaming(folder: Path) -> None:
    import streaming

    columns = {"image": "ndarray:uint8:16,16,3", "row": "int"}
    with streaming.MDSWriter(out=f"{folder}/mds", columns=columns, size_limit=2000) as shards:
        for row, image in enumerate(images()):
            shards.write({"image": image, "row": row})


def open_streaming(folder: Path) -> Any:
    import streaming

    return streaming.StreamingDataset(local=f"{folder}/mds", batch_size=4, shuffle=True)


#: Name → the module that is needed, how a file is written, and how it is opened.
FORMATS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Reader]]] = {
    "h5py": ("h5py", write_h5py, open_h5py),
    "LMDB": ("lmdb", write_lmdb, open_lmdb),
    "memmap": ("numpy", write_memmap, open_memmap),
    "Arrow": ("pyarrow", write_arrow, open_arrow),
    "torchvision": ("torchvision", write_png, open_torchvision),
}
#: The same for what is read from its beginning to its end: a dataset that workers divide among them.
STREAMS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Any]]] = {
    "webdataset": ("webdataset", write_webdataset, open_webdataset),
    "streaming": ("streaming", write_streaming, open_streaming),
}


def installed(formats: dict[str, Any]) -> list[str]:
    return [name for name, (module, *_) in formats.items() if importlib.util.find_spec(module)]


def write_all(folder: Path) -> None:
    for name in installed(FORMATS):
        FORMATS[name][1](folder)
    for name in installed(STREAMS):
        STREAMS[name][1](folder)


class Rows(Dataset[Any]):
    """The rows of all formats, one format after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = installed(FORMATS)
        self._readers: dict[str, Reader] = {}

    def __len__(self) -> int:
        return ROWS * len(self._names)

    def __getitem__(self, index: int) -> Any:
        name = self._names[index // ROWS]
        if name not in self._readers:
            self._readers[name] = FORMATS[name][2](self._folder)
        return self._readers[name](index % ROWS), index


class Streams(ChainDataset):
    """Of this module, so that a worker imports it before torchvision, which `streaming` needs."""


def epoch(loader: Any, folder: Path, method: str) -> dict[str, list[Any]]:
    """The batches of each format: two workers read each, and all are read by the same two."""
    torch.manual_seed(5)
    streams = [STREAMS[name][2](folder) for name in installed(STREAMS)]
    found = {}
    for names, dataset in (
        (installed(FORMATS), Rows(folder)),
        (installed(STREAMS), Streams(streams)),
    ):
        batches = list(loader(dataset, ROWS // 2, num_workers=2, multiprocessing_context=method))
        assert len(batches) == 2 * len(names)
        found |= {name: batches[2 * at : 2 * at + 2] for at, name in enumerate(names)}
    return found
