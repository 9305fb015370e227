"""State that the user's modules make at import: in a worker as in torch's, under each start method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_script
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes

PROGRAM = """
import json, os, sys
import numpy as np
import torch
import fastq_loader

RNG = np.random.default_rng()

class Main:
    def __call__(self):
        return {"main": int(RNG.integers(1 << 60)), "its name": __name__}

if __name__ == "__main__":
    from tests.support.module_state import States
    library, method, workers = sys.argv[1:]
    DataLoader = {"torch": torch.utils.data.DataLoader, "fastq_loader": fastq_loader.DataLoader}[library]
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(States(method == "fork", Main()), None, num_workers=int(workers), generator=generator,
                        multiprocessing_context=method)
    with open("states", "w") as states:
        for epoch in range(2):
            print(json.dumps(list(loader)), file=states)
            os.environ["MODULE_STATE"] = "changed"
            with open("edited.py", "w") as file:
                file.write("VALUE = 'edited'")
"""
#: Random: only which of them are equal is the same in two runs.
RANDOM = (
    "main",
    "a generator",
    "a cache",
    *(f"{name} at import" for name in ("random", "numpy", "torch", "torch's seed")),
)


def states(folder: Path) -> dict[str, list[Any]]:
    """Each state, sample by sample, of two epochs."""
    output = (folder / "states").read_text().replace(str(folder), "FOLDER")
    samples = [sample for line in output.splitlines() for sample in json.loads(line)]
    assert len(samples) == 12
    found = {name: [sample[name] for sample in samples] for name in samples[0]}
    for name in RANDOM:
        found[name] = [found[name].index(value) for value in found[name]]
    for values in found["arguments"]:
        values.pop(1)  # the library's name
    return found


@pytest.mark.timeout(250)
@thorough(after=1)
@pytest.mark.parametrize(("method", "workers"), [("spawn", 1), ("spawn", 2), ("fork", 2), ("forkserver", 2)])
def test_p11_a_worker_has_imported_and_inherited_what_torchs_has(
    method: str, workers: int, tmp_path: Path
) -> None:
    runs, folders = [], [tmp_path / library for library in ("torch", "fastq_loader")]
    for folder in folders:
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        (folder / "edited.py").write_text("VALUE = 1")
        (folder / "numbers").write_text("".join(f"{number:4}" for number in range(1000)))
        environment = {"MODULE_STATE": "as it was", "MODULE_STATE_FILE": str(folder / "numbers")}
        runs.append((str(folder), [folder.name, method, str(workers)], environment))
    result = run_script(f"from tests.support.programs import at_once; exec(at_once(*{runs}))", warm=True)
    assert (result.returncode, result.left) == (0, ()), result
    torchs, ours = map(states, folders)
    assert ours == torchs
    if method == "forkserver":
        assert len(set(ours["a generator"])) == 12, "torch's are all different"
