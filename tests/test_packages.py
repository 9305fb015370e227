"""What `python -m build` makes, with and without a C compiler, works in an empty environment."""

from __future__ import annotations

import os
import platform
import re
import runpy
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
from tests.support.thorough import thorough

pytest.importorskip("build")

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
TAGS = f"{PYTHON}-{PYTHON}t-" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp310-abi3-"
NO_COMPILER = (
    platform.machine() != "x86_64"
    or shutil.which(sysconfig.get_config_var("CC").split()[0]) is None
    or not Path(sysconfig.get_path("include"), "Python.h").exists()
)


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
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clean clone would have."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    checkout = tmp_path_factory.mktemp("checkout")
    git = ("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    for name in subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    return checkout


@pytest.fixture(scope="module")
def source(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    with tarfile.open(build("sdist", checkout, tmp_path_factory.mktemp("sdist"))) as archive:
        unpacked = tmp_path_factory.mktemp("unpacked")
        archive.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


@thorough()
@pytest.mark.processes
def test_a_source_distribution_has_every_file_and_a_page_without_dead_links(
    checkout: Path, source: Path
) -> None:
    def files(folder: Path) -> set[str]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix() for path in found if ".egg-info" not in str(path)}

    assert files(source) == files(checkout) | {"PKG-INFO", "setup.cfg"}
    page = (source / "PKG-INFO").read_text()
    assert "License-File: LICENSE" in page
    assert "## Guarantees" in page
    assert not re.findall(r"\]\((?!https:)", page)


def test_the_page_on_pypi_links_to_the_files_of_its_version() -> None:
    backend = runpy.run_path(str(ROOT / ".build" / "backend.py"))
    text = "[a](b/c.md#d) ![e](f.png) [g](https://h) [i](#j)"
    linked = "[a](https://x/v1/b/c.md#d) ![e](https://x/v1/f.png?raw=true) [g](https://h) [i](#j)"
    assert backend["readme"](text, "https://x/v1") == linked
    assert backend["readme"](text, None) == "a  [g](https://h) [i](#j)"


@thorough()
@pytest.mark.processes
@pytest.mark.parametrize(
    "compiler", [False, pytest.param(True, marks=pytest.mark.skipif(NO_COMPILER, reason="none"))]
)
def test_a_wheel_made_of_the_source_distribution_works(compiler: bool, source: Path, tmp_path: Path) -> None:
    wheel = build("wheel", source, tmp_path / "wheel", **({} if compiler else {"CC": "false"}))
    with zipfile.ZipFile(wheel) as archive:
        ours = (path.relative_to(ROOT).as_posix() for path in (ROOT / "fastq_loader").rglob("*"))
        assert files_of_the_package(archive.namelist()) == files_of_the_package(ours)
    tags = wheel.stem.split("-", 2)[2]
    assert tags.startswith(TAGS) if compiler else tags == "py3-none-any"

    # Empty but for what the package needs, which is found where this test found it.
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text("\n".join(site.getsitepackages()))
    program = ROOT / "tests" / "support" / "two_workers.py"
    assert run(python, program) == f"{packages}/fastq_loader {compiler}\n"
