"""Images go to the device and are normalised there, beside the step before.

    python prefetch.py FOLDER

FOLDER holds `images.npy`, uint8[N, 3, height, width], and `labels.npy`, int64[N]. For images of your own,
change `Images`. What used to be NVIDIA apex's `data_prefetcher` is one argument of the loader: `on_device`.
`HandWritten` is that class, for comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Prefetcher, ToDevice, normalize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Images(Dataset[tuple[Tensor, int]]):
    """`images[i]` is (uint8[3, height, width], int): an image and its class."""

    def __init__(self, folder: Path) -> None:
        self.images = np.load(folder / "images.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy").tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[index].copy()), self.labels[index]


def on_device(dataset: Images, device: torch.device, **options: Any) -> Iterable[Any]:
    """Batches that arrive on the device, and are normalised there."""
    to_device = ToDevice(device, transform=normalize(MEAN, STD))
    return DataLoader(dataset, device=to_device, **options)


def with_prefetcher(dataset: Images, device: torch.device, **options: Any) -> Iterable[Any]:
    """The same for any other loader."""
    return Prefetcher(torch.utils.data.DataLoader(dataset, **options), device, normalize(MEAN, STD))


class HandWritten:
    """The apex loop over torch's loader. Without a GPU nothing runs beside the step."""

    def __init__(self, dataset: Images, device: torch.device, **options: Any) -> None:
        self.loader: Any = torch.utils.data.DataLoader(dataset, pin_memory=device.type == "cuda", **options)
        self.normalize, self.device = normalize(MEAN, STD), device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def preload(self) -> None:
        self.batch = next(self.batches, None)
        if self.batch is not None:
            with torch.cuda.stream(self.stream):
                batch = [each.to(self.device, non_blocking=True) for each in self.batch]
                self.batch = self.normalize(batch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.loader)
        self.preload()
        while self.batch is not None:
            batch = self.batch
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
                for each in batch:
                    each.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


def train(
    folder: Path,
    make_batches: Callable[..., Iterable[Any]] = on_device,
    num_workers: int = 4,
    epochs: int = 3,
    track: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, description: batches,
) -> tuple[float, Tensor]:
    """Train; the mean loss of the last epoch, and the classes that were predicted in it.

    Args:
        make_batches: `on_device`, `with_prefetcher` or `HandWritten`.
        track: wraps each pass over the batches, as `rich.progress.track` does.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    batches = make_batches(Images(folder), device, batch_size=64, shuffle=True, **options)
    model = nn.Sequential(nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model = model.append(nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1, epochs + 1):
        losses, found = [], []
        for images, labels in track(batches, f"epoch {epoch}"):
            optimizer.zero_grad()
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            found.append(scores.detach().argmax(dim=1))
        mean = float(torch.stack(losses).mean())
        print(f"epoch {epoch}: loss {mean:.4f}")
    return mean, torch.cat(found).cpu()


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Path(sys.argv[1]))
