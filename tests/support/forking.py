"""Short epochs in which the user forks at random moments, in the consumer and in workers: what this process
holds stays as it is. More than the tests run:

    python -c "from tests.support.forking import main; main(2000)"
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from tests.conftest import descendants, live_threads, open_descriptors, process_table, wait_until
from tests.support.datasets import Sized


def fork(work: Callable[[], Any]) -> int:
    """A child that does some work and leaves, with 1 if that fails; its process id."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def end_of(pid: int) -> int:
    """The exit code of a child, which is waited for."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a child of this process, with limits and signals of its own: much quicker than a script.

    The child ends well, prints nothing to stderr, and leaves no process.
    """

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with tempfile.TemporaryFile() as stderr:

            def work() -> None:
                os.setsid()
                os.dup2(stderr.fileno(), 2)
                sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                torch.set_num_threads(1)  # OpenMP's are not forked, and would be waited for
                test(*arguments, **named)

            pid = fork(work)
            code = end_of(pid)
            stderr.seek(0)
            lines = stderr.read().decode().splitlines(keepends=True)
            text = "".join(line for line in lines if not line.startswith("Error in cpuinfo: "))  # torch's
            assert (code, text) == (0, ""), f"exit code {code}\n{text}"

        def left() -> list[str]:
            return [str(each) for each in process_table() if each.session == pid and not each.zombie]

        assert wait_until(lambda: not left(), 5), left()

    return run


class Forks(Sized, Dataset[torch.Tensor]):
    """Large enough for a block; forks for some of its samples, and waits for the child."""

    length = 12

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.full((40_000,), float(index))
        if index % 11 == 5:
            end_of(fork(sample.sum))
        return sample


def held() -> dict[str, int]:
    return {
        "descriptors": len(open_descriptors()),
        "threads": len(live_threads()),
        "children": len(descendants()),
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def run_epochs(epochs: int, seed: int) -> None:
    rng = random.Random(seed)
    children: deque[int] = deque()
    loader: Any = None
    for _ in range(epochs):
        if loader is None or rng.random() < 0.2:
            if loader is not None:
                loader.close()
            loader = DataLoader(
                Forks(),
                2,
                num_workers=2,
                persistent_workers=rng.random() < 0.7,
                schedule=rng.choice(["round_robin", "dynamic"]),
            )
        stop = rng.choice([2, 6, 6, 6])
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [2.0 * number, 2.0 * number + 1]
            if rng.random() < 0.2:
                children.append(fork(batch.sum))
            if number == stop:
                break
        while len(children) > 3:
            end_of(children.popleft())
    for child in children:
        end_of(child)
    loader.close()


def main(epochs: int, seed: int = 0) -> None:
    run_epochs(epochs // 5, seed)  # what is made once is there after these
    before = held()
    run_epochs(epochs - epochs // 5, seed + 1)
    print(json.dumps({"before": before, "after": held()}))
