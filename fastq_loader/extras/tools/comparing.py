"""`compare`: run torch's DataLoader and ours on the same seeds, and compare their batches and costs.

Runs in the consumer. Each pass over the data runs in a process of its own (`trials.in_child`), so the user's
loader, its dataset, samplers and generators stay as they are, and each pass starts from the same state.

The first pass of each loader takes a digest of every batch, with torch's schedule. The last one takes no
digests and is timed. If two digests differ, both digest passes are repeated and also return that batch. As
torch's pass has then run twice, data that are not reproducible are not blamed on a loader.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count, islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import _DatasetKind

from fastq_loader import options
from fastq_loader.epoch import resources
from fastq_loader.errors import check_seconds, is_int
from fastq_loader.extras.images import sample_seeds
from fastq_loader.extras.insight import processes
from fastq_loader.extras.resume.text import dump
from fastq_loader.extras.tools import trials
from fastq_loader.extras.tools.leaves import ComparedLeaf, difference, digest, leaves
from fastq_loader.loader import DataLoader
from fastq_loader.packing.tensors import tensors_of
from fastq_loader.reading import generators
from fastq_loader.system.terminal import printable

#: torch's class, also after `install` has put ours in its place.
TORCHS: Any = torch.utils.data.DataLoader
#: Seconds between two measurements of memory: the first, their growth factor and the longest. Short passes
#: are measured often, and long ones are not disturbed.
_LOOK, _LONGER, _MOST_LOOK = 0.03, 1.5, 0.5
#: Seconds below which a timed pass is too short to rely on; ratio to torch's speed below which ours counts as
#: slower; columns of the page; seconds between two lines of progress.
_SHORT, _SLOWER, _WIDTH, _SILENCE = 1.0, 0.95, 80, 5.0


_HEADER = ("", "batches/s", "first batch", "CPU", "memory")


@dataclass(frozen=True)
class ComparisonRow:
    """Costs of the epochs with one of the loaders; 0 means unknown.

    Attributes:
        loader: "torch" or "fastq_loader".
        batches: number of batches in all epochs.
        seconds: duration of all epochs, including the steps and the start and end of the workers.
        first_batch_seconds: seconds from `iter()` to the first batch of the first epoch.
        cpu_seconds: CPU seconds of all its processes; unknown if workers start by "forkserver".
        memory_bytes: peak memory of all its processes, as PSS: shared pages count once.
        error: type and text of the error that ended the pass; "" if none did.

    >>> ComparisonRow("torch", batches=100, seconds=2.0).batches_per_second
    50.0
    """

    loader: str
    batches: int = 0
    seconds: float = 0.0
    first_batch_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: float = 0.0
    error: str = ""

    @property
    def batches_per_second(self) -> float:
        return 0.0 if self.error or not self.batches else self.batches / self.seconds

    def _cells(self) -> tuple[str, ...]:
        costs = (
            (self.batches_per_second, "{:,.4g}"),
            (self.first_batch_seconds, "{:.3f} s"),
            (self.cpu_seconds, "{:.2f} s"),
            (self.memory_bytes / 1e6, "{:,.0f} MB"),
        )
        return self.loader, *(form.format(value) if value else "-" for value, form in costs)


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`. `print` of it is a page.

    Attributes:
        equal: whether all batches, and the states of the generators after each epoch, are equal.
        difference: description of the first difference, with its likely cause; None if they are equal.
        batches: number of batches compared.
        rows: torch's costs, then ours.
        notes: parts that the comparison left out or did in another way.

    >>> rows = ComparisonRow("torch", 100, 2.0), ComparisonRow("fastq_loader", 100, 0.5)
    >>> print(Comparison(True, None, 100, rows))
    Equal: 100 batches (values, types, strides, order), and the random generators.
    fastq_loader gives 4.0 times torch's batches per second.
    ...
    """

    equal: bool
    difference: str | None
    batches: int
    rows: tuple[ComparisonRow, ComparisonRow]
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        alike = f"Equal: {self.batches:,} batches (values, types, strides, order), and the random generators."
        head = f"Not equal: {self.difference}" if self.difference else alike
        lines = [_HEADER, *(row._cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.rjust, cells, widths)) for cells in lines]
        about, notes = [*head.splitlines(), self._speed()], [""] * bool(self.notes) + [*self.notes]
        about, notes = ([textwrap.fill(text, _WIDTH) for text in texts] for texts in (about, notes))
        return printable("\n".join([*about, "", *table, *notes]))

    def _speed(self) -> str:
        torchs, ours = self.rows
        if not torchs.batches_per_second or not ours.batches_per_second:
            return "There is no speed to compare."
        ratio = ours.batches_per_second / torchs.batches_per_second
        slower = " `python -m fastq_loader tune` looks for a faster setting." if ratio < _SLOWER else ""
        return f"fastq_loader gives {ratio:.1f} times torch's batches per second.{slower}"


def compare(
    loader: Any,
    epochs: int = 1,
    step_seconds: float = 0.0,
    batches: int | None = None,
    *,
    progress: bool = True,
) -> Comparison:
    """Compare torch's DataLoader with this one, batch by batch on the same seeds, and measure both.

    Each pass over the data, four in all, runs in a process of its own: the loader, its dataset, samplers and
    all generators stay as they are. Batches stay on the host. Values are compared with torch's schedule,
    "round_robin"; speed is measured with the loader's own schedule. Seeds of encoded images are not compared,
    but what is drawn from them is.

    Args:
        loader: a DataLoader, torch's or this one; the other one is made from its attributes.
        epochs: number of epochs in each pass.
        step_seconds: seconds of the training step after each batch, simulated by sleeping in timed passes.
        batches: the most batches to read of each epoch; None for all.
        progress: write a line to stderr every 5 seconds. False writes only one, if the number of batches is
            unknown: such a stream may have no end.

    Raises:
        ValueError, TypeError: an argument is invalid.
        RuntimeError: this system has no worker processes.

    >>> compare(DataLoader(torch.arange(64), 8, shuffle=True)).equal
    True
    """
    checked(loader, epochs, step_seconds, batches)
    torchs, ours, *timed = _variants(loader)
    method = trials.start_method(loader) if loader.num_workers else "fork"
    run = _runner(method, epochs, batches, progress)
    first, second = run("torch", torchs), run("fastq_loader", ours)
    pairs = enumerate(zip(first.digests, second.digests, strict=False))
    differing = next((number for number, (one, other) in pairs if one != other), None)
    text = None
    if differing is not None:
        again = run("torch", torchs, keep=differing), run("fastq_loader", ours, keep=differing)
        text = difference(again[0].kept, again[1].kept, ("with torch", "with fastq_loader"))
        text = text or "two batches, but not when they were loaded again"
        text += f" ({error})." if (error := first.costs.error or second.costs.error) else "."
        probed = trials.in_child(_Probe(torchs), method)
        text += f"\n{_cause(loader, probed, first.digests == again[0].digests, error)}"
    rows = run("torch", timed[0], step_seconds).costs, run("fastq_loader", timed[1], step_seconds).costs
    errors = first.costs.error, second.costs.error
    seconds = min((row.seconds for row in rows if row.batches), default=math.inf)
    notes = (*_notes(loader, errors, seconds, batches), *_opaque(second.opaque))
    return Comparison(differing is None, text, second.costs.batches, rows, notes)


def _runner(method: str, epochs: int, batches: int | None, progress: bool) -> Callable[..., PassResult]:
    """Return a function that makes a pass in a process of its own, from the present generator states."""
    seeds, numbers = generators.states_of(generators.GLOBAL), count(1)

    def run(name: str, loader: Any, step: float | None = None, keep: int | None = None) -> PassResult:
        most, wait = 0, _LOOK

        def look(pid: int) -> float:
            nonlocal most, wait
            most, wait = max(most, processes.proportional(pid)), min(wait * _LONGER, _MOST_LOOK)
            return wait

        number = next(numbers)
        about = f"compare: pass {number}, {name}" if progress or number == 1 else ""
        task = _LoaderRun(loader, name, seeds, epochs, batches, step, keep, about, not progress)
        seen: PassResult = trials.in_child(task, method, look=look)
        return seen._replace(costs=replace(seen.costs, memory_bytes=most))

    return run


def checked(loader: Any, epochs: Any, step_seconds: Any, batches: Any) -> None:
    """Validate the arguments of `compare`, where the errors are described."""
    trials.check_loader(loader, TORCHS, "compare needs a DataLoader")
    for name, value in (("epochs", epochs), ("batches", 1 if batches is None else batches)):
        if not is_int(value) or value < 1:
            raise ValueError(f"{name}={value!r} must be a number, 1 or more")
    check_seconds("step_seconds", step_seconds)
    if loader.num_workers and (method := trials.start_method(loader)) != "fork":
        for name in ("collate_fn", "worker_init_fn"):
            try:
                ForkingPickler.dumps(getattr(loader, name))
            except Exception as error:  # pickle raises many kinds
                raise ValueError(
                    f"torch's DataLoader cannot send {name} to workers under {method!r}, so there is nothing "
                    f"to compare ({error}): define it with `def` at the top of a module"
                ) from error


def _variants(loader: Any) -> list[Any]:
    """torch's loader and ours, set to give equal values; then both with the user's settings, on the host."""
    kinds: Any = (TORCHS, type(loader)) if isinstance(loader, DataLoader) else (type(loader), DataLoader)
    plain = {**_VALUES, **_HOST, "num_workers": int(loader.num_workers)}
    pairs = zip(kinds * 2, (plain, plain, _HOST, _HOST), strict=True)
    return [made_of(loader, kind, changed) for kind, changed in pairs]


def made_of(loader: Any, kind: Any, changed: Mapping[str, Any]) -> Any:
    """A loader of another class, with changed arguments."""
    made = kind.__new__(kind)
    vars(made).update({**vars(loader), "_iterator": None})
    options.put(made, dict(changed))
    resources.forget(made)
    return made


def _cause(loader: Any, probed: str, reproducible: bool, error: str) -> str:
    if not reproducible:
        return (
            "But torch's DataLoader differs from itself in two runs with the same seeds: the data are not "
            f"reproducible. Likely cause: {probed or 'dataset or collate_fn'} reads the time or the process "
            "id, draws from a generator that nothing seeds, or writes to memory that it has already returned."
        )
    if probed:
        return f"Likely cause: {probed} keeps state between its calls."
    if type(loader) not in (TORCHS, DataLoader):
        return f"Likely cause: an override in the subclass {type(loader).__qualname__}."
    if error:
        return (
            "Around errors the loaders differ on purpose: fastq_loader raises an error, also the sampler's, "
            "after the batches before it and with its original type, and sends functions to its workers that "
            "pickle refuses; see DIFFERENCES.md, in the folder of this package."
        )
    if "fastq_loader.extras.images.encoded" in sys.modules:
        return (
            "Crops and flips of fastq_loader.images differ on purpose: their seeds belong to samples, and "
            "with torch's loader they are drawn from its generator. Compare with scale=None, flip=0."
        )
    return "Dataset and collate_fn gave equal results twice, so the loader is at fault: please report it."


def _notes(loader: Any, errors: tuple[str, str], seconds: float, batches: int | None) -> Iterator[str]:
    """Notes about parts that were left out or done in another way."""
    for usual, text in (
        (_VALUES, "values were compared with torch's defaults instead, and the speed was measured as set."),
        (_HOST, "left out; batches stayed on the host, and workers were processes of this machine."),
    ):
        given = {name: getattr(loader, name, default) for name, default in usual.items()}
        if changed := [f"{name}={value!r}" for name, value in given.items() if value != usual[name]]:
            yield f"{', '.join(changed)}: {text}"
    if type(loader) not in (TORCHS, DataLoader):
        yield f"Only one of the two loaders has the overrides of the subclass {type(loader).__qualname__}."
    if batches is not None:
        yield f"At most {batches} batches of each epoch were read."
    if all(errors):
        kinds = {error.partition(":")[0] for error in errors}
        both = f"torch's raised {errors[0]}, and fastq_loader's {errors[1]}" if len(kinds) > 1 else ""
        yield f"{both or f'Both raised {errors[1]}'}: they were compared up to that error."
    elif seconds < _SHORT:
        yield f"A timed pass took only {seconds:.2f} s, too short to rely on: use more epochs."


def _opaque(found: Mapping[str, str]) -> Iterator[str]:
    for kind, path in found.items():
        yield f"Not compared: the contents of a {kind} ({path}), which cannot be pickled."


#: Arguments with which both loaders give equal batches; arguments with which only loading is measured.
_VALUES: dict[str, Any] = {"schedule": "round_robin", "errors": "raise", "in_order": True}
_HOST: dict[str, Any] = {"device": None, "pin_memory": False, "workers": "processes"}


# ---- in the child --------------------------------------------------------------------------------


class PassResult(NamedTuple):
    """Results of a pass.

    Attributes:
        digests: digests of each batch, of the generators after each epoch, and of an error, as they came.
        kept: the parts of the value whose digest has the number `keep`.
        opaque: kinds of parts that could not be compared → path of one of them.
        costs: costs of all epochs.
    """

    digests: list[bytes]
    kept: list[ComparedLeaf]
    costs: ComparisonRow
    opaque: dict[str, str]


@dataclass
class _LoaderRun(trials.ChildTask):
    """A pass over the data: timed if `step` is a number of seconds, else with digests. `keep`: number of the
    digest whose parts are returned, too. A pass that takes longer than `_SILENCE` reports its progress."""

    name: str
    seeds: dict[str, Any]
    epochs: int
    batches: int | None
    step: float | None
    keep: int | None
    about: str  # begins the lines of progress; "" for none
    quiet: bool  # the only line is that the length is unknown

    def run(self) -> None:
        self.seen = PassResult([], [], ComparisonRow(self.name), {})
        generators.set_states(generators.GLOBAL, self.seeds)
        self.came, self.first, error = 0, 0.0, ""
        cpu, began = _cpu_seconds(), time.monotonic()
        # In torch's loader, seeds of images would advance torch's generator, and in ours they do not.
        apart = sample_seeds.again() if self.step is None else nullcontext()
        self.until = began + _SILENCE
        try:
            with apart:
                for epoch in range(self.epochs):
                    self._epoch(epoch)
        except Exception as raised:  # of user code: both loaders may raise it at the same place
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler may raise that a worker ended
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
            kind = type(raised)
            self._note(f"a {kind.__module__}.{kind.__qualname__}", "an error")
        seconds = time.monotonic() - began
        self.close()  # the CPU time of workers counts once they have ended
        served = self.loader.num_workers and trials.start_method(self.loader) == "forkserver"
        cpu = 0.0 if served else _cpu_seconds() - cpu
        costs = ComparisonRow(self.name, self.came, seconds, self.first, cpu, error=error)
        self.seen = self.seen._replace(costs=costs)

    def _epoch(self, epoch: int) -> None:
        began, number = time.monotonic(), -1
        for number, batch in enumerate(islice(iter(self.loader), self.batches)):
            self.first = self.first or time.monotonic() - began
            self.came += 1
            self._note(batch, f"batch {number} of epoch {epoch}: batch")
            time.sleep(self.step or 0.0)
            if self.about and time.monotonic() > self.until:
                self._report(epoch)
        if number + 1 != self.batches:  # otherwise workers have drawn ahead
            self._note(self._states(), f"the end of epoch {epoch}: generators")

    def _report(self, epoch: int) -> None:
        self.until = math.inf if self.quiet else time.monotonic() + _SILENCE
        text = f"{self.about}: {self.came:,} batches, in epoch {epoch + 1} of {self.epochs}"
        try:
            of_all = self.batches or len(self.loader)
        except Exception:  # it has no length, or the dataset's `__len__` raises
            trials.report(f"{text}, whose length is unknown: --batches N, or batches=N, ends it earlier")
        else:
            if not self.quiet:
                trials.report(f"{text}, each of {of_all:,}")

    def _note(self, value: Any, path: str) -> None:
        if self.step is None:
            parts = list(leaves(value, path))
            self.seen.opaque.update({leaf.kind: leaf.path for leaf in parts[::-1] if leaf.opaque})
            if self.keep == len(self.seen.digests):
                self.seen.kept.extend(parts)
            self.seen.digests.append(digest(parts))

    def _states(self) -> dict[str, str]:
        own = {"generator": self.loader.generator, "sampler": self.loader._index_sampler}
        found = {**generators.GLOBAL, **generators.find(own, but=[self.loader.dataset])[0]}
        texts = {name: dump(generators.state_of(each)) for name, each in found.items()}
        return {name: blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}

    def result(self) -> PassResult:
        return self.seen


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = os.times()  # in hundredths of seconds, which an epoch of this process may not take
    return time.process_time() + children.children_user + children.children_system


@dataclass
class _Probe(trials.ChildTask):
    """Reads and collates the first samples twice with the same seeds, to find what differs."""

    found: str = ""

    def run(self) -> None:
        loader = self.loader
        make: Any = _DatasetKind.create_fetcher
        rules = loader.dataset, loader._auto_collation, lambda samples: samples, loader.drop_last
        with suppress(Exception):  # of user code, which may expect to run in a worker
            index = next(iter(loader._index_sampler))
            samples, _ = self._twice("the dataset", lambda: make(loader._dataset_kind, *rules).fetch(index))
            made = self._twice("collate_fn", lambda: loader.collate_fn(samples))
            addresses = [{each.data_ptr() for each in tensors_of(batch) if each.numel()} for batch in made]
            if not self.found and addresses[0] & addresses[1]:
                self.found = "collate_fn, which returns the same memory twice,"

    def _twice(self, name: str, read: Callable[[], Any]) -> list[Any]:
        made, parts = [], []
        own, _ = generators.find({"dataset": self.loader.dataset, "collate_fn": self.loader.collate_fn})
        for _ in range(2):
            with generators.restored({**generators.GLOBAL, **own}):
                made.append(read())
            parts.append(list(leaves(made[-1], "a sample" if name == "the dataset" else "a batch")))
        text = difference(parts[0], parts[1], ("at first", "then"))
        self.found = self.found or (text and f"{name} ({text})")
        return made

    def result(self) -> str:
        return self.found
