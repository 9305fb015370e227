"""The private names of torch are those of a list, and one that is gone is named with torch's release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fastq_loader.system import torch_names
from tests.conftest import run_script
from tests.support.thorough import thorough


def test_a_name_that_is_gone_is_named() -> None:
    with pytest.raises(
        ImportError, match=rf"^torch {re.escape(torch.__version__)} has no torch\._utils\._gone"
    ):
        torch_names._find("_utils._gone_too", "_utils._gone")


@thorough()
@pytest.mark.processes
@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_FrameAction"), reason="this torch compiles our calls"
)
def test_a_loop_under_torch_compile_is_that_of_torchs_loader(tmp_path: Path) -> None:
    """Nothing of ours is traced or compiled; torch.compile is not imported by us."""
    result = run_script(
        f"""
        import os, sys, warnings, torch, torch.utils.data
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(tmp_path)!r}
        import fastq_loader
        assert "torch._dynamo" not in sys.modules
        from torch._dynamo.testing import CompileCounter
        from torch._dynamo.utils import counters

        def run(kind, workers):
            torch._dynamo.reset()
            counters.clear()
            counter = CompileCounter()

            @torch.compile(backend=counter)
            def epoch(loader):
                total = 0
                for batch in loader:
                    total = total + (batch * 2).sum()
                return total

            @torch.compile(backend=counter)
            def step(batches):
                return next(batches) + 1

            loader = kind(torch.arange(16.0), 4, num_workers=workers)
            found = [epoch(loader), epoch(loader), step(iter(loader)).sum()], counter.frame_count
            return found, counters["frames"]["total"]

        for workers in (0, 2):
            with warnings.catch_warnings(record=True):  # of what multiprocessing does
                torchs, most = run(torch.utils.data.DataLoader, workers)
            ours, frames = run(fastq_loader.DataLoader, workers)
            assert ours == torchs and frames <= most, (workers, ours, torchs, frames, most)
        """,
        warm=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
