"""How packages are built: by setuptools, with a wheel for the stable ABI where the interpreter has one.

One wheel serves every Python from 3.10 on, except the free-threaded ones: they have no stable ABI (setuptools
refuses the option there), and each needs a wheel of its own. pyproject.toml cannot tell them apart.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the other hooks, as they are)

STABLE_ABI = "--py-limited-api=cp310"


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel (PEP 517). Options that the caller gives are kept."""
    settings = dict(config_settings or {})
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        given = settings.get("--build-option", [])
        settings["--build-option"] = [STABLE_ABI, *([given] if isinstance(given, str) else given)]
    return build_meta.build_wheel(wheel_directory, settings, metadata_directory)
