"""The API reference is made of the docstrings without a warning, shows what is public, and its links lead
somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastq_loader


def test_the_reference_shows_what_is_public(tmp_path: Path) -> None:
    """Every warning of pdoc is an error here."""
    pdoc = pytest.importorskip("pdoc", reason="pip install -e '.[docs]' brings it")
    pdoc.pdoc("fastq_loader", "!fastq_loader.", output_directory=tmp_path)
    assert {path.name for path in tmp_path.rglob("*.html")} == {"fastq_loader.html", "index.html"}
    page = Path(tmp_path, "fastq_loader.html").read_text()
    shown = {*re.findall(r'<section id="([^".]+)"', page)}
    assert shown == {*fastq_loader.__all__}
    targets = {*re.findall(r'href="(?!https?:)([^"]*)"', page)} - {"${url}"}
    assert targets <= {f"#{anchor}" for anchor in re.findall(r'id="([^"]+)"', page)}
    docstrings = re.findall(r'<div class="docstring">(.*?)</div>', page, re.S)
    unread = re.compile(r"\|---|<p>(Args|Attributes|Raises|Returns)\b|@private")
    assert [text for text in docstrings if unread.search(text)] == []
    assert "<table>" in docstrings[0]
