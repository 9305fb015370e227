"""Photographs decoded, cropped and flipped beside the step; a run that is stopped goes on where it was.

    python photographs.py FOLDER

FOLDER holds JPEGs, and `table.csv` with the columns kind (0, 1, ...) and path. For photographs of your own,
change `Photographs`. `on_device` decodes for the GPU, `in_workers` on the CPUs; without a GPU the pixels, and
so the losses, are the same to the bit. The crops are those of the sample in any case. Needs pillow, and
simplejpeg for speed.

`with_pillow` is the same recipe with torch's loader, as it is written without this package, and
`with_torchvision` that with torchvision's transforms: the crops are drawn from torch's generator, so they and
the losses are other ones.
"""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastq_loader import StatefulDataLoader, ToDevice
from fastq_loader.images import DecodeImages, encoded

SIDE, KINDS, SCALE = 64, 5, (0.2, 1.0)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photographs(Dataset[tuple[Any, int]]):
    """`photographs[i]` is a file, or what `pixels` makes of it, and its kind."""

    def __init__(
        self,
        folder: Path,
        pixels: Callable[[Any], Any] = lambda file: file,
        read: Callable[[Path], Any] = encoded,
    ) -> None:
        with (folder / "table.csv").open(newline="") as table:
            rows = list(csv.DictReader(table))
        self.paths = [folder / row["path"] for row in rows]
        self.kinds = [int(row["kind"]) for row in rows]
        self.pixels, self.read = pixels, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.pixels(self.read(self.paths[index])), self.kinds[index]


def on_device(
    folder: Path, device: torch.device, pixels: DecodeImages, **options: Any
) -> StatefulDataLoader[Any]:
    """Workers read the files; they are decoded on the device, ahead of the step."""
    return StatefulDataLoader(Photographs(folder), device=ToDevice(device, transform=pixels), **options)


def in_workers(
    folder: Path, device: torch.device, pixels: DecodeImages, **options: Any
) -> StatefulDataLoader[Any]:
    """Workers read and decode the files."""
    return StatefulDataLoader(Photographs(folder, pixels), device=device, **options)


class Pillow:
    """A random crop, resized and flipped, as a normalised tensor."""

    def __init__(self) -> None:
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __call__(self, path: Path) -> Tensor:
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = self.box(*image.size)
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - self.mean) / self.std

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the crop, by the rule of torchvision's `RandomResizedCrop`."""
        for _ in range(10):
            area = width * height * float(torch.empty(()).uniform_(*SCALE))
            ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if across <= width and down <= height:
                left = int(torch.randint(width - across + 1, ()))
                top = int(torch.randint(height - down + 1, ()))
                return left, top, left + across, top + down
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return left, top, left + side, top + side


class Torchvision:
    """The same by torchvision's transforms."""

    def __init__(self) -> None:
        from torchvision.transforms import v2

        crop, flip = v2.RandomResizedCrop(SIDE, scale=SCALE), v2.RandomHorizontalFlip()
        to_float = v2.ToDtype(torch.float32, scale=True)
        self.transform = v2.Compose([v2.ToImage(), crop, flip, to_float, v2.Normalize(MEAN, STD)])

    def __call__(self, path: Path) -> Tensor:
        with Image.open(path) as file:
            image: Tensor = self.transform(file.convert("RGB"))
        return image.as_subclass(Tensor)


def with_torch(
    decoder: Callable[[], Callable[[Path], Tensor]], folder: Path, device: Any, pixels: Any, **options: Any
) -> Any:
    """torch's loader: workers read and decode the files."""
    del options["schedule"]
    return torch.utils.data.DataLoader(Photographs(folder, decoder(), lambda path: path), **options)


with_pillow, with_torchvision = partial(with_torch, Pillow), partial(with_torch, Torchvision)


def train(
    folder: Path,
    make_loader: Callable[..., Any] = on_device,
    num_workers: int = 4,
    epochs: int = 3,
    track: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, description: batches,
    checkpoint: Path = Path(os.devnull),
    stop: int | None = None,
) -> tuple[float, Tensor]:
    """Train; the mean loss of the last epoch, and the kinds that were predicted in it.

    Args:
        make_loader: `on_device` or `in_workers`; for comparison `with_pillow` or `with_torchvision`.
        track: wraps each pass over the loader, as `rich.progress.track` does.
        checkpoint: file from which the run goes on, if it exists.
        stop: number of the step, from the beginning of the run, after which `checkpoint` is written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = True
    pixels = DecodeImages(SIDE, scale=SCALE, mean=MEAN, std=STD)
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "schedule": "dynamic"}
    loader = make_loader(folder, device, pixels, batch_size=16, shuffle=True, **options)
    body = nn.Sequential(nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    model = body.extend([nn.Flatten(), nn.Linear(1568, KINDS)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    epoch, losses, found = 1, list[Tensor](), list[Tensor]()
    if checkpoint.is_file():
        state, epoch, losses, found, *states = torch.load(checkpoint, weights_only=False)
        loader.load_state_dict(state)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for epoch in range(epoch, epochs + 1):  # noqa: B020
        for images, kinds in track(loader, f"epoch {epoch}"):
            optimizer.zero_grad()
            scores = model(images.to(device))  # ours are there already
            loss = nn.functional.cross_entropy(scores, kinds.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            found.append(scores.detach().argmax(dim=1))
            if stop is not None and (epoch - 1) * len(loader) + len(losses) == stop:
                states = [model.state_dict(), optimizer.state_dict()]
                torch.save([loader.state_dict(), epoch, losses, found, *states], checkpoint)
                return float(losses[-1]), scores.detach()
        mean, predictions = float(torch.stack(losses).mean()), torch.cat(found).cpu()
        print(f"epoch {epoch}: loss {mean:.4f}")
        losses.clear()
        found.clear()
    return mean, predictions


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Path(sys.argv[1]))
