"""The programs of the troubleshooting page run as they stand there, and print what stands below them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

import fastq_loader
from tests.conftest import run_script
from tests.support.sandbox import private_mounts
from tests.support.thorough import thorough

PAGE = Path(fastq_loader.__file__).with_name("TROUBLESHOOTING.md").read_text()
#: Heading → program, and the lines of its output that are shown.
PARTS = {
    heading: (program, shown.splitlines())
    for heading, program, shown in re.findall(
        r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```(?:(?!^## ).)*?```text\n(.*?)```", PAGE, re.S | re.M
    )
}

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

#: Both loaders wait five seconds for a worker that is stuck, and that they end then.
HURRY = """
import torch.utils.data._utils
import fastq_loader.workers.stopping
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = fastq_loader.workers.stopping.ORDERLY = 0.2
"""
#: What goes before a program that needs surroundings of its own. CUDA is one that only the parent has
#: initialised; whoever uses it runs into torch's own check.
SURROUNDINGS = {
    "CUDA after a fork": """
        import os, torch
        look, parent = torch.cuda._lazy_init, os.getpid()
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent
        torch.cuda._lazy_init = lambda: None if os.getpid() == parent else look()
    """,
    "Notebooks": "del __file__",
}


#: The programs that end quickly. What the others show has a test of its own in `end_to_end/`.
QUICK = ["A worker was killed", "Too many open files", "CUDA after a fork", "Memory grows with the batches"]


def test_every_symptom_has_a_program_but_for_hints_and_limits() -> None:
    assert [*PARTS, "Hints", "Limits"] == re.findall(r"^## (.*)", PAGE, re.M)
    for heading, (program, _) in PARTS.items():
        compile(program, heading, "exec")
    assert {*QUICK} < {*PARTS}


@pytest.mark.processes
@thorough(but={"heading": QUICK})
@pytest.mark.parametrize("heading", PARTS)
def test_a_program_prints_what_the_page_says(heading: str) -> None:
    program, shown = PARTS[heading]
    mounts = private_mounts() if heading == "/dev/shm is full" else []
    if heading == "/dev/shm is full" and not mounts:
        pytest.skip("another /dev/shm cannot be mounted here")
    if mounts and TORCH < (2, 13):
        pytest.skip("an older torch's worker ends by a bus error there, and the page shows 2.13's words")
    source = "\n".join((HURRY, textwrap.dedent(SURROUNDINGS.get(heading, "")), program))
    result = run_script(source, prefix=mounts, warm=not mounts)
    assert (result.returncode, result.left) == (0, ()), result.stderr
    pattern = ".*^".join(re.escape(line).replace("…", ".*?") + "$" for line in shown)
    assert re.search(f"^{pattern}", result.stdout, re.S | re.M), result.stdout + result.stderr
    if "share(" in program:
        *own, one, other = map(int, re.findall(r"(\d+) MB", result.stdout))
        assert min(own) > 2 * max(one, other), "each worker has a copy, and none once it is shared"


def test_the_table_of_symptoms_leads_to_all_of_them() -> None:
    table = PAGE.partition("\n## ")[0]
    assert len(set(re.findall(r"\]\((#[^)]*)\)", table))) == len([*PARTS, "Hints", "Limits"])
