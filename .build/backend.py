"""How packages are built: by setuptools, with what pyproject.toml cannot say.

That is the tags of a wheel, the files of a source distribution, and the links of the page on PyPI.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403 (the hooks, as they are)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.egg_info import egg_info
from setuptools.command.sdist import sdist


class Wheel(bdist_wheel):
    """A wheel that says what it is good for.

    One wheel serves every Python from 3.10 on (the stable ABI), except the free-threaded ones: they have no
    stable ABI, and each needs a wheel of its own. A wheel without the compiled module serves every system.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        if not sysconfig.get_config_var("Py_GIL_DISABLED"):
            self.py_limited_api = "cp310"

    def get_tag(self) -> tuple[str, str, str]:
        """Called when everything is built, for the file's name and for its metadata."""
        compiled = self.get_finalized_command("build_ext").get_outputs()
        self.root_is_pure = not all(Path(file).exists() for file in compiled)
        return super().get_tag()


class Source(sdist):
    """A source distribution that can run its tests: with what they import, and the pages that they read."""

    def make_distribution(self) -> None:
        self.filelist.extend(["CHANGELOG.md", ".gitignore"])
        for folder in (".build", ".ci", ".github", "bench", "fastq_loader", "tests"):
            self.filelist.graft(folder)
        self.filelist.global_exclude("*.py[cod]")
        self.filelist.global_exclude("*.so")
        super().make_distribution()


class Metadata(egg_info):
    """Metadata with a README for PyPI."""

    def finalize_options(self) -> None:
        super().finalize_options()
        metadata = self.distribution.metadata
        address = metadata.project_urls.get("Repository")
        files = f"{address}/blob/v{metadata.version}" if address else None
        metadata.long_description = readme(metadata.long_description, files)


def readme(text: str, files: str | None) -> str:
    """The README as PyPI shows it, where a relative link leads nowhere.

    Args:
        text: the README.
        files: where the files of this version are. If None, the words of a link stay, and pictures go.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if files is None:
            return "" if picture else words
        return f"{picture}[{words}]({files}/{path}{'?raw=true' if picture else ''})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)
