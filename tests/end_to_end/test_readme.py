"""Every Python block of the README, and of the pages that it leads to, runs as it stands there."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import fastq_loader
from fastq_loader import DataLoader, RayWorkers, StatefulDataLoader
from fastq_loader.extras.tools.command import find, main
from fastq_loader.images import DecodeImages
from tests.conftest import ROOT
from tests.support.datasets import Sized, identity
from tests.support.late_device import late_device


def found_in(room: str) -> list[Path]:
    """Its pages; those of the bench's results are tables that it wrote."""
    return sorted(page for page in ROOT.joinpath(room).rglob("*.md") if "results" not in page.parts)


#: The programs of the page of troubleshooting have a test of their own.
PAGES = [
    *("README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md"),
    *(str(page.relative_to(ROOT)) for room in ("bench", "fastq_loader", "tests") for page in found_in(room)),
]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


BLOCKS = {page: re.findall(r"```python\n(.*?)```", text_of(page), re.S) for page in PAGES}
(PREFETCHERS,) = BLOCKS["fastq_loader/device/INSIDE.md"]
FIRST, MY_DATA, RECIPES = BLOCKS["README.md"]
RAY = BLOCKS["fastq_loader/extras/remote/README.md"][0]
RESUME, PREEMPTION = BLOCKS["fastq_loader/extras/resume/README.md"]
SLOW, *LOGGERS, GETITEMS, COLLATE = BLOCKS["fastq_loader/extras/insight/README.md"]
BAD, REPLAY = BLOCKS["fastq_loader/reading/README.md"]
#: With the names that the README's recipes import.
BY_TASK = {
    "slow": [SLOW],
    "bad": [BAD, REPLAY],
    "device": BLOCKS["fastq_loader/device/README.md"],
    "cached": BLOCKS["fastq_loader/extras/cached/README.md"],
    "images": BLOCKS["fastq_loader/extras/images/README.md"],
}


class Images(Sized, Dataset[Any]):
    """Small images with a label, and a list that could be shared."""

    def __init__(self, length: int = 1200, size: int = 4) -> None:
        self.length, self.size = length, size
        self.names = [f"{number}.png" for number in range(length)]

    def decode(self, index: int) -> torch.Tensor:
        return torch.full((3, self.size, self.size), index % 251, dtype=torch.uint8)

    def __getitem__(self, index: int) -> Any:
        return self.decode(index), index


def train(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def run(block: str, **names: Any) -> dict[str, Any]:
    """What a block leaves behind."""
    exec(compile(block, "a page", "exec"), names)
    return names


def test_there_is_no_block_that_is_not_run() -> None:
    found = {block for page, blocks in BLOCKS.items() if "TROUBLE" not in page for block in blocks}
    of_tasks = {block for blocks in BY_TASK.values() for block in blocks}
    assert found == {
        PREFETCHERS,
        FIRST,
        MY_DATA,
        RECIPES,
        COLLATE,
        GETITEMS,
        RAY,
        RESUME,
        PREEMPTION,
        *LOGGERS,  # extras/insight/test_loggers.py
        *of_tasks,
    }
    for room in ("bench", "fastq_loader", "tests"):
        pages = [str(page.relative_to(ROOT)) for page in ROOT.joinpath(room).rglob("*.md")]
        assert {page for page in pages if "```python" in text_of(page)} <= {*PAGES}


def test_the_readme_is_short_and_leads_to_each_task() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 140
    imports, *recipes = RECIPES.split("\n\n")
    assert "import" in imports
    assert len(recipes) == 10
    assert all("# " in recipe and len(recipe.splitlines()) <= 5 for recipe in recipes)
    assert {"GPU", "cache", "stop and resume", "too slow"} <= set(re.findall(r"\[([^]]*)\]\(", text))
    linked = set(re.findall(r"\]\(([^)#:]+)", text))
    linked |= {
        f"fastq_loader/{page}" for page in re.findall(r"\]\(([^)#:]+)", text_of("fastq_loader/README.md"))
    }
    assert {page for page in PAGES if page.startswith("fastq_loader/")} <= linked, "a page that nobody finds"


@pytest.mark.processes
def test_the_first_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    run(FIRST)
    printed = capsys.readouterr().out
    assert sorted(map(int, re.findall(r"\d+", printed))) == list(range(1000))


@pytest.mark.processes
def test_the_first_comparison_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder of the file, whose name the commands have. It has imports of its own."""
    mine = f"from {__name__} import Images as MyDataset"
    Path(tmp_path, "my_data.py").write_text(f"from torch.utils.data import DataLoader\n{mine}\n{MY_DATA}")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, command = re.findall(r"^    python -m fastq_loader (.*)$", text_of("README.md"), re.M)
    assert type(find("my_data:make_loader")()) is torch.utils.data.DataLoader
    assert main([*command.split(), "--batches", "3"]) == 0
    printed = capsys.readouterr().out
    assert re.match("Equal: 3 batches (.*), and the random generators.\n", printed)
    assert re.search(r"^fastq_loader gives [\d.]+ times torch's batches per second\.", printed, re.M)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[str, Any]]]:
    """What recipes have as given, over a simulated device; the search for the fastest setting takes a second
    instead of thirty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fastq_loader, "tune", partial(fastq_loader.tune, seconds=1, progress=False))
    names = {"mean": [0.5] * 3, "std": [0.25] * 3, "torch": torch, "train": train}
    with late_device(monkeypatch):
        yield lambda: {**names, "dataset": Images(), "images": Images()}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_the_recipes_run(given: Callable[[], dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run(RECIPES, **given())
    assert "Nothing can be said yet" in capsys.readouterr().out, "of a loader that has not been iterated"


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("task", BY_TASK)
def test_the_page_of_a_task_runs(task: str, given: Callable[[], dict[str, Any]]) -> None:
    for block in BY_TASK[task]:
        names = {
            **vars(fastq_loader),
            "DecodeImages": DecodeImages,
            "torch": torch,
            "functools": functools,
            **given(),
        }
        run(block, **{**names, "loader": DataLoader(Images(), 64, schedule="dynamic")})
    if task == "slow":
        assert Path("epoch.json").stat().st_size > 0


@pytest.mark.processes
def test_the_functions_of_the_recipes_run() -> None:
    names = {"torch": torch, "fastq_loader": fastq_loader}
    collate = run(COLLATE, **names)["collate"]

    class Table(Sized, Dataset[Any]):
        length, features, labels = 8, torch.rand(8, 2).numpy(), torch.arange(8).numpy()
        __getitems__ = run(GETITEMS, **names)["__getitems__"]

    photographs = torch.rand(4, 3, 224, 224)
    with DataLoader(photographs, 2, num_workers=1, collate_fn=collate) as loader:
        assert torch.equal(torch.cat(list(loader)), photographs)
    with DataLoader(Table(), 4, num_workers=1, collate_fn=identity) as loader:
        assert [labels.tolist() for _, labels in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("name", ["prefetched", pytest.param("by_hand", marks=pytest.mark.gpu)])
def test_the_prefetchers_give_the_loaders_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one by hand on a GPU, the other over a simulated device."""
    if (on_gpu := name == "by_hand") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    loader = torch.utils.data.DataLoader(Images(10), 3, pin_memory=on_gpu)
    with nullcontext() if on_gpu else late_device(monkeypatch):
        batches = list(run(PREFETCHERS, torch=torch)[name](loader, "cuda"))
    for expected, batch in zip(loader, batches, strict=True):
        assert all(torch.equal(here, there.cpu()) for here, there in zip(expected, batch, strict=True))


def test_the_loader_over_ray_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayWorkers, "missing", lambda _: "")
    assert run(RAY, dataset=Images())["loader"].num_workers == 32


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.processes
def test_a_run_that_is_stopped_goes_on(tmp_path: Path) -> None:
    shown: list[int] = []

    def tqdm(batches: Iterable[Any], initial: int, total: int) -> Iterable[Any]:
        shown.append(total - initial)
        return batches

    names = {"StatefulDataLoader": StatefulDataLoader, "torch": torch, "model": torch.nn.Linear(1, 1)}
    run(RESUME, dataset=Images(128), tqdm=tqdm, epochs=1, **names)
    assert shown == [2]


@pytest.mark.processes
def test_a_job_that_is_told_to_end_saves_and_leaves(tmp_path: Path) -> None:
    seen: list[int] = []
    model = torch.nn.Linear(1, 1)

    def leave(batch: Any) -> None:
        seen.extend(batch[1].tolist())
        if len(seen) == 12:
            signal.raise_signal(signal.SIGTERM)

    def start(train: Callable[[Any], None]) -> None:
        names = {"torch": torch, "fastq_loader": fastq_loader, "os": os, "sys": sys, "train": train}
        with StatefulDataLoader(Images(24), 4, num_workers=1) as loader:
            run(PREEMPTION, loader=loader, model=model, path=tmp_path / "saved", epochs=1, **names)

    with pytest.raises(SystemExit):
        start(leave)
    start(lambda batch: seen.extend(batch[1].tolist()))
    assert seen == list(range(24))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), link
            assert not anchor or anchor in anchors(path.read_text()), link


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
