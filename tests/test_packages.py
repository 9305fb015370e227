"""What `python -m build` makes, with and without a C compiler, works in an empty environment."""

from __future__ import annotations

import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("build")

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
ABI = f"cp{sys.version_info.major}{sys.version_info.minor}t" if FREE_THREADED else "abi3"
NO_COMPILER = (
    platform.machine() != "x86_64"
    or shutil.which(sysconfig.get_config_var("CC").split()[0]) is None
    or not Path(sysconfig.get_path("include"), "Python.h").exists()
)
PROGRAM = """
import fastq_loader
from fastq_loader.memory import nontemporal

if __name__ == "__main__":
    loader = fastq_loader.DataLoader(range(8), 4, num_workers=2)
    print(fastq_loader.__path__[0], nontemporal.AVAILABLE, [batch.tolist() for batch in loader])
"""


def run(python: Path | str, *arguments: Path | str, **environment: str) -> str:
    """What it prints: not in the checkout, nor with it on the path, or the checkout would be imported."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    result = subprocess.run([python, *arguments], env=env, cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(what: str, source: Path, target: Path, **environment: str) -> Path:
    """The package (`what`: "sdist" or "wheel") that is made of `source`."""
    run(sys.executable, "-m", "build", "-n", f"--{what}", "--outdir", target, source, **environment)
    (package,) = target.glob("fastq_loader-*")
    return package


def files_of_the_package(names: Iterable[str]) -> set[str]:
    return {
        name for name in names if name.endswith((".py", ".pyi", ".c", "py.typed")) and "fastq_loader/" in name
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in (".build", "fastq_loader"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, checkout)
    with tarfile.open(build("sdist", checkout, tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(checkout / "sdist", filter="data")
    (unpacked,) = (checkout / "sdist").iterdir()
    return unpacked


@pytest.mark.processes
@pytest.mark.parametrize(
    "compiler", [False, pytest.param(True, marks=pytest.mark.skipif(NO_COMPILER, reason="none"))]
)
def test_a_wheel_made_of_the_source_distribution_works(compiler: bool, source: Path, tmp_path: Path) -> None:
    wheel = build("wheel", source, tmp_path / "wheel", **({} if compiler else {"CC": "false"}))
    with zipfile.ZipFile(wheel) as archive:
        ours = (path.relative_to(ROOT).as_posix() for path in (ROOT / "fastq_loader").rglob("*"))
        assert files_of_the_package(archive.namelist()) == files_of_the_package(ours)
    assert ABI in wheel.name.split("-")

    # Empty but for what the package needs, which is found where this test found it.
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text("\n".join(site.getsitepackages()))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert run(python, program) == f"{packages}/fastq_loader {compiler} [[0, 1, 2, 3], [4, 5, 6, 7]]\n"
