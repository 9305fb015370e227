"""Tests of the bench. They are skipped without the packages of its extra: pip install -e '.[test,bench]'."""

import pytest

for package in ("PIL", "matplotlib", "pandas", "psutil", "rich", "sklearn"):
    pytest.importorskip(package, reason="needs the extra 'bench'")
