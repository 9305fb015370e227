"""Defects made on purpose in the pure parts, to see that a test falls for each: `python -m tests.mutants`.

Every one is a small change of the text. The runner applies it to a copy of the package in a temporary folder
and runs the tests of the pure parts there, two copies at a time. It prints by which test each was caught, and
fails when one was not. Numbers as arguments run only those.

Left out because they change nothing that could be seen: the look at a claim's word before its lock is taken
(it only saves the lock), whether an abandoned line's ring is emptied (the next epoch has a new one), and
whether `Line.lost_by` looks at the state (when a death is processed, all else of that worker has left).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
FILES = ("test_window", "test_blocks", "test_claims", "test_backlog", "test_scheduler")
AT_A_TIME = 2
SECONDS = 100  # for one run; one that takes longer hangs, and is caught by that


class Mutant(NamedTuple):
    """One defect: `old` stands once in `module`, and becomes `new`."""

    module: str
    what: str
    old: str
    new: str


MUTANTS = (
    # ---- attempts and deaths
    Mutant(
        "scheduler", "stale attempts count", "if answer.attempt != batch.attempt:", "if batch.attempt < 0:"
    ),
    Mutant("scheduler", "restarts are not counted", "self._restarts_left -= 1", "pass"),
    Mutant(
        "scheduler",
        "restarts are not renewed with the epoch",
        "self._restarts_left = self._restarts\n",
        'self._restarts_left = getattr(self, "_restarts_left", self._restarts)\n',
    ),
    Mutant("scheduler", "two deaths are poison", "DEADLY = 3", "DEADLY = 2"),
    Mutant("scheduler", "only four deaths are poison", "DEADLY = 3", "DEADLY = 4"),
    Mutant(
        "scheduler",
        "deaths at a batch are not added up",
        "self._deaths[event.seq] = self._deaths.get(event.seq, 0) + 1",
        "self._deaths[event.seq] = 1",
    ),
    Mutant(
        "scheduler",
        "deaths at any batch are added up",
        "self._deaths[event.seq] = self._deaths.get(event.seq, 0) + 1",
        "self._deaths[event.seq] = sum(self._deaths.values()) + 1",
    ),
    Mutant("scheduler", "a replay has the old attempt", "            batch.attempt += 1\n", ""),
    Mutant(
        "scheduler",
        "a replay is the new worker's alone",
        "            if self.dynamic:\n                batch.worker = None\n",
        "",
    ),
    Mutant(
        "owed",
        "lost answers of a claimant are not loaded again",
        "or batch.ticket in died.unheard",
        "",
    ),
    Mutant(
        "scheduler",
        "a new worker is not told what is anyone's",
        "if self.dynamic:  # what the others",
        "if not self.dynamic:  # what the others",
    ),
    Mutant(
        "scheduler", "replays go backwards", "key=lambda batch: batch.seq)", "key=lambda batch: -batch.seq)"
    ),
    Mutant("scheduler", "an idle death is forgotten", "self._idle_deaths.append(worker)", "pass"),
    Mutant("owed", "tasks outlive the last worker", "(last or batch.ticket", "(batch.ticket"),
    Mutant(
        "scheduler",
        "out of order, a death waits for its place",
        "        self._inbox.append(event)\n        if self.dynamic and not lost:",
        "        if self.dynamic and not lost:",
    ),
    Mutant(
        "scheduler",
        "out of order, a death overtakes what came before",
        "if head.state == LOST and (self.in_order or not self._inbox):",
        "if head.state == LOST:",
    ),
    Mutant(
        "scheduler",
        "what a stream's end had passed over dies",
        "if self._line.get(at) is batch:  # else",
        "if epoch == self.epoch:  # else",
    ),
    # ---- grants
    Mutant(
        "scheduler",
        "a claimed task's blocks are not handed over",
        "self.ledger.hand_over(batch.holder, worker, batch.grants + batch.promises)",
        "pass",
    ),
    Mutant(
        "scheduler",
        "the blocks of a dead claimant are not given back",
        "                self._give_back(batch)\n                batch.worker",
        "                batch.worker",
    ),
    Mutant("scheduler", "a dead writer keeps its blocks", "self.ledger.writer_dead(worker)", "pass"),
    Mutant(
        "scheduler",
        "blocks of an answer that nobody believes are given back early",
        "        self.refused += 1\n",
        "        self.refused += 1\n        self._give_back(batch)\n",
    ),
    Mutant(
        "scheduler",
        "blocks of what cannot be sent are lost",
        "        self._give_back(batch)\n        self._fail(batch, event.error)",
        "        self._fail(batch, event.error)",
    ),
    Mutant(
        "scheduler",
        "blocks of a late epoch's batch are lost",
        "            self.stale += 1\n            self._drop(answer)",
        "            self.stale += 1",
    ),
    # ---- epochs
    Mutant(
        "scheduler",
        "what is taken back keeps its blocks",
        "self._give_back(self.owed.settle(epoch, seq))",
        "self.owed.settle(epoch, seq)",
    ),
    Mutant(
        "scheduler",
        "what is taken back is still owed",
        "self._give_back(self.owed.settle(epoch, seq))",
        "self._give_back(batch)",
    ),
    Mutant(
        "scheduler",
        "who has a task of an old epoch is forgotten",
        "self._claimed(batch, event.claimed[batch.ticket])",
        "pass",
    ),
    Mutant(
        "owed",
        "tickets come again",
        "batch.ticket = self._next\n        self._next += 1",
        "batch.ticket = self._next\n        self._next = 1",
    ),
    Mutant(
        "owed",
        "numbers come round to a batch that is late",
        "self._next % self._places in self._taken",
        "False",
    ),
    Mutant(
        "owed",
        "a place is given up with the claim",
        "self._taken.add(self._next % self._places)",
        "pass",
    ),
    Mutant(
        "owed",
        "an answer leaves its place taken",
        "        batch = self.pop((epoch, seq))\n        if batch.worker is None:",
        "        batch = self.pop((epoch, seq))\n        if False:",
    ),
    Mutant("scheduler", "a known claim of an old epoch keeps its place", "self.owed.found(batch)", "pass"),
    Mutant(
        "scheduler",
        "what is taken back is only this epoch's",
        "if batch.worker is None and batch.ticket in event.taken_back:",
        "if epoch == self.epoch and batch.worker is None and batch.ticket in event.taken_back:",
    ),
    Mutant(
        "scheduler",
        "anybody may answer",
        "if batch is None or batch.worker not in (None, worker):",
        "if batch is None:",
    ),
    Mutant(
        "owed",
        "anybody is expected to answer",
        "batch is not None and batch.worker in (None, worker) and",
        "batch is not None and",
    ),
    Mutant("owed", "any attempt is expected", " and batch.attempt == answer.attempt", ""),
    Mutant(
        "scheduler",
        "an unbelieved answer of an old epoch fails a new batch",
        "if self._line.get(batch.seq) is batch:",
        "if self._line.get(batch.seq) is not None:",
    ),
    # ---- what a busy worker need not know
    Mutant(
        "backlog", "nobody is passed over", "                self.behind.add(worker)", "                pass"
    ),
    Mutant(
        "backlog",
        "what was missed is forgotten",
        "            self._missed.update(tasks)",
        "            pass",
    ),
    Mutant(
        "backlog",
        "all that was missed is kept",
        "if len(self._missed) > 2 * self._limit:",
        "if self._limit < 0:",
    ),
    Mutant(
        "backlog",
        "what others have is sent too",
        "        self._forget_claimed(on_offer)\n        tasks",
        "        tasks",
    ),
    Mutant("backlog", "an epoch that was missed is missed for ever", "self._outdated |= self.behind", "pass"),
    Mutant("backlog", "who was passed over is sent the tasks twice", "self.behind -= ready", "pass"),
    Mutant(
        "backlog",
        "who has not read its ping is caught up",
        "ready = self.behind - self._pinged",
        "ready = set(self.behind)",
    ),
    Mutant("backlog", "a ping comes back twice", "        self._pinged.discard(worker)", "        pass"),
    # ---- draws and the window
    Mutant("scheduler", "a draw follows its batch", "return [_DRAW, deliver]", "return [deliver, _DRAW]"),
    Mutant("scheduler", "after one epoch no sampler is asked again", "self.window.begin_epoch()", "pass"),
    Mutant(
        "window",
        "an empty sampler is asked at every batch",
        "if room >= self.group and not self._closed else 0",
        "if room >= self.group else 0",
    ),
    Mutant("window", "an empty sampler is asked when the head is late", "if self._closed:", "if False:"),
    Mutant(
        "window",
        "the window has no cap",
        "wider = min(now + self.least - unanswered, self.widest)",
        "wider = now + self.least - unanswered",
    ),
    Mutant("window", "the window has no budget", "if batch_bytes > 0:", "if batch_bytes < 0:"),
    Mutant("window", "the window never shrinks", "self.size -= -(-(self.size - self.least) // 4)", "pass"),
    Mutant("window", "the window shrinks at once", "_CALM_WINDOWS = 4", "_CALM_WINDOWS = 0"),
    Mutant(
        "window", "what is under way does not count", "now = max(self.size, under_way)", "now = self.size"
    ),
    Mutant(
        "window",
        "growth does not begin the calm anew",
        "self.size = under_way\n            self._calm = 0",
        "self.size = under_way",
    ),
    Mutant("window", "a group is never complete", "if room >= self.group", "if room > self.group"),
    # ---- the tables
    Mutant("states", "no replay", '"break": GONE, "replay": SENT,', '"break": GONE,'),
    Mutant("states", "no poison", '"replay": SENT, "fail": READY}', '"replay": SENT}'),
    Mutant("states", "no skipping", '"skip": GONE, ', ""),
    Mutant("states", "no replacing", '"replace": ACTIVE}', "}"),
    Mutant("states", "no last word of the dead", 'DEAD: {"end": DRY_DEAD, ', "DEAD: {"),
    Mutant("states", "the dead rise", 'DRY_DEAD: {"epoch": DEAD}', 'DRY_DEAD: {"epoch": ACTIVE}'),
    # ---- turns and the line
    Mutant("roster", "a share is rounded down", "if window % len(self) else", "if window < 0 else"),
    Mutant("roster", "torch's share is rounded up", "if window % len(self) else", "if window else"),
    Mutant(
        "roster",
        "the turn does not start anew",
        "        self._turn = 0\n        self._undelivered = [0] * len(self)",
        "        self._undelivered = [0] * len(self)",
    ),
    Mutant("roster", "what was handed out counts", "self._undelivered[worker] -= 1", "pass"),
    Mutant("roster", "one death is all deaths", "return all(state in _GONE", "return any(state in _GONE"),
    Mutant("line", "what is skipped stays", '                self.leave(batch, "skip")\n', ""),
    # ---- blocks
    Mutant(
        "blocks", "a dead worker frees what users look at", '"writer_dead": HELD}', '"writer_dead": FREE}'
    ),
    Mutant("blocks", "a declined promise frees what users look at", '"decline": HELD', '"decline": FREE'),
    Mutant(
        "blocks",
        "anything is handed over",
        "if block.writer != holder or block.state not in (GRANTED, PROMISED):",
        "if block.writer is None:",
    ),
    Mutant(
        "blocks",
        "trimmed ranges are given out twice",
        "        self._space.pop(worker, None)\n        gaps",
        "        gaps",
    ),
    Mutant(
        "blocks",
        "a successor gets less",
        "        if end > start:\n            gaps",
        "        if end < start:\n            gaps",
    ),
    Mutant(
        "blocks",
        "what users hold is spare",
        "spare = self.nbytes - self._held_bytes - ",
        "spare = self.nbytes - ",
    ),
    # ---- the worker's list
    Mutant(
        "tasks", "a lower task comes last", "insort(self._tasks, task, key=_seq)", "self._tasks.append(task)"
    ),
    Mutant(
        "tasks",
        "a busy task is forgotten",
        "                at += 1\n",
        "                del self._tasks[at]\n",
    ),
    Mutant("tasks", "another one's task is done too", "            if mine:\n", "            if True:\n"),
    Mutant(
        "tasks", "who cannot work takes tasks", "if self._retired:", "if self._retired and task.attempt < 0:"
    ),
    Mutant(
        "tasks",
        "claimed tasks are answered with the epoch",
        "return [] if self._claimed else list(tasks)",
        "return list(tasks)",
    ),
    Mutant("tasks", "an answered task is still in hand", "self._claims.begin(self._worker, None)", "pass"),
    Mutant(
        "tasks",
        "worker 0 is nobody",
        "claim(task.ticket, self._worker + 1)",
        "claim(task.ticket, self._worker)",
    ),
    Mutant("claims", "two have one ticket", "free: bool = self._words[at] == word", "free: bool = True"),
    Mutant(
        "claims",
        "a lock stays",
        "_FLOCK.pack(_UNLOCK, 0, ticket, 1, 0)",
        "_FLOCK.pack(_WRITE, 0, ticket, 1, 0)",
    ),
    Mutant(
        "claims",
        "an overwritten slot is believed",
        "if word >> _WHO != ticket:",
        "if word == 0:",
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of the runs: a failure is enough, its smallest form is not looked for."""
    settings.register_profile("mutants", derandomize=True, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


def mutated(mutant: Mutant, package: Path) -> str:
    """The module's text with the defect."""
    text = (package / f"{mutant.module}.py").read_text()
    assert text.count(mutant.old) == 1, f"{mutant.what}: {mutant.old!r} stands {text.count(mutant.old)} times"
    return text.replace(mutant.old, mutant.new)


def caught_by(mutant: Mutant | None) -> str | None:
    """The first test that fails with the defect; None if there is none."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("fastq_loader", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            (copy / "fastq_loader" / f"{mutant.module}.py").write_text(mutated(mutant, ROOT / "fastq_loader"))
        files = [f"tests/{name}.py" for name in FILES]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants", "--no-header", "--tb=no"]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *options, *files]
        try:
            run = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return "the time limit"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py\S*)", run.stdout, re.MULTILINE)
    return found[1] if found else f"exit code {run.returncode}: {run.stdout[-300:]}{run.stderr[-300:]}"


def main(numbers: Sequence[int]) -> int:
    """Run the mutants with these numbers; how many survived."""
    if caught_by(None) is not None:
        raise SystemExit("the tests fail without any mutant")
    survived = 0
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        verdicts = pool.map(caught_by, [MUTANTS[number] for number in numbers])
        for number, verdict in zip(numbers, verdicts, strict=True):
            mutant = MUTANTS[number]
            survived += verdict is None
            print(f"{number:3} {mutant.module:10} {mutant.what:58} {verdict or 'SURVIVED'}", flush=True)
    return survived


if __name__ == "__main__":
    sys.exit(bool(main([int(one) for one in sys.argv[1:]] or range(len(MUTANTS)))))
