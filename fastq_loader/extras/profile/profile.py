"""`loader.profile()`: which line of user code takes the time of loading, as a table and as pages.

Runs in the consumer. The samples come with the workers' answers (see `sampler`), so those of workers that die
are kept, too. pyinstrument (extra `profile`) draws the pages.
"""

from __future__ import annotations

import linecache
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from fastq_loader.extras.profile.sampler import Sampler, Stack
from fastq_loader.statistics.counters import Counters
from fastq_loader.system.terminal import printable

#: Lines of the table, columns of it, functions of libraries below a line, and the least share to be shown.
_LINES, _WIDTH, _BELOW, _LEAST = 20, 80, 3, 0.005
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
#: The folder of a library, also on another machine.
_LIBRARY = re.compile(r".*/(site-packages|dist-packages|lib/python3\.\d+t?)/")


class ProfiledLine(NamedTuple):
    """A line of code, with the share of the time of loading that it takes.

    Attributes:
        share: 0 to 1, with all that the line called except for other lines of the user's.
        function, file: where the line is.
        line: its number in the file; 0: the function as a whole.
        below: the functions of libraries that it called, the longest first; without their own.
    """

    share: float
    function: str
    file: str
    line: int = 0
    below: tuple[ProfiledLine, ...] = ()

    @property
    def where(self) -> str:
        """The function, and the file as briefly as possible."""
        file = _LIBRARY.sub("", self.file).removeprefix(os.getcwd() + os.sep)
        if os.path.isabs(file):
            file = os.path.basename(file)
        return f"{self.function} ({file}:{self.line})" if self.line else f"{self.function} ({file})"


class Profile:
    """Where the time of loading goes; grows while the block of `loader.profile()` lasts. `print` of it is a
    table.

    Attributes:
        seconds: time of loading, of all workers together.

    >>> print(Profile(Counters()))
    Nothing was sampled: no epoch began in the block.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters, self._first_epoch = counters, counters.epochs
        self._seen = defaultdict[Stack, float](float)
        self._sampler: Sampler | None = None

    def add(self, seen: Mapping[Stack, float]) -> None:
        """Add samples of a reader."""
        for stack, seconds in seen.items():
            self._seen[stack] += seconds

    def sampler(self) -> Sampler:
        """A sampler of the calling thread, which loads without workers."""
        self.end()
        self._sampler = Sampler(self.add)
        return self._sampler

    def end(self) -> None:
        """End the sampler of this process."""
        if self._sampler is not None:
            self._sampler.end()
            self._sampler = None

    @property
    def seconds(self) -> float:
        return sum(self._seen.values())

    @property
    def lines(self) -> tuple[ProfiledLine, ...]:
        """The lines that take the time, the slowest first. A sample belongs to the innermost line of user
        code; without one, to the outermost line of a library; without that, to this package."""
        total, found = self.seconds, defaultdict[Any, Any](lambda: defaultdict(float))
        for stack, seconds in self._seen.items():
            users = [at for at, (_, file, *_) in enumerate(stack) if not _is_library(file)]
            others = (at for at, (_, file, *_) in enumerate(stack) if not file.startswith(_OWN))
            at = users[-1] if users else next(others, len(stack))
            called = stack[at + 1][:2] if at + 1 < len(stack) else None
            where = stack[at] if at < len(stack) else ("collating, and other work", "fastq_loader", 0, 0)
            found[where][called] += seconds
        lines = []
        for (name, file, _, line), below in found.items():
            share = sum(below.values()) / total
            below.pop(None, None)
            parts = [ProfiledLine(seconds / total, *each) for each, seconds in below.items()]
            lines.append(ProfiledLine(share, name, file, line, tuple(sorted(parts, reverse=True))))
        return tuple(sorted(lines, reverse=True))

    def __str__(self) -> str:
        if not self._seen:
            logs = [log for number, log in self._counters.logs.items() if number >= self._first_epoch]
            loaded = any(log.batches for log in logs)
            why = "the batches took no time" if loaded else "no batch was loaded"
            return f"Nothing was sampled: {why if logs else 'no epoch began in the block'}."
        head = f"Loading took {self.seconds:.3f} s, added up over workers, in these lines of your code:"
        rows = [head, ""]
        for line in self.lines:
            if line.share >= _LEAST:
                source = linecache.getline(line.file, line.line).strip()
                rows.append(f"{line.share:6.1%}  {line.where}{source and ': '}{source}")
            below = [each for each in line.below if each.share >= _LEAST]
            rows += [f"{each.share:6.1%}      {each.where}" for each in below[:_BELOW]]
        return printable("\n".join(row[:_WIDTH] for row in rows[:_LINES]))

    def html(self, path: str | PathLike[str]) -> None:
        """Write a page with the tree of all calls. Raises ImportError without pyinstrument, and OSError."""
        self._write(path, "HTMLRenderer")

    def speedscope(self, path: str | PathLike[str]) -> None:
        """Write a file for https://www.speedscope.app; raises as `html`."""
        self._write(path, "SpeedscopeRenderer")

    def _write(self, path: str | PathLike[str], renderer: str) -> None:
        check_pages()
        from pyinstrument import renderers
        from pyinstrument.session import Session

        # Its format: the name, the file and the first line of a function; behind \x01l the line in progress.
        records = [
            ([f"{name}\x00{file}\x00{first}\x01l{line}" for name, file, first, line in stack], seconds)
            for stack, seconds in sorted(self._seen.items())
            if stack
        ]
        about: dict[str, Any] = {"start_time": 0.0, "duration": self.seconds, "cpu_time": self.seconds}
        about |= {"sample_count": len(records), "target_description": "loading of batches"}
        about |= {"frame_records": records, "start_call_stack": [""]}
        Path(path).write_text(
            getattr(renderers, renderer)().render(Session.from_json(about)), encoding="utf-8"
        )


@contextmanager
def profiled(counters: Counters) -> Iterator[Profile]:
    """Profile the epochs of a loader that begin while the context lasts; see `DataLoader.profile`."""
    if counters.profile is not None:
        raise RuntimeError("this loader is being profiled already: end that block first")
    profile = counters.profile = Profile(counters)
    try:
        yield profile
    finally:
        counters.profile = None
        profile.end()


def check_pages() -> None:
    """Raise ImportError if pages cannot be written."""
    try:
        import pyinstrument  # noqa: F401
    except ImportError as error:
        text = "pages need pyinstrument: pip install 'fastq-loader[profile]'; the table needs nothing"
        raise ImportError(text) from error


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", "<__", _OWN)) or _LIBRARY.match(file) is not None
