"""Certificates for tests of encrypted connections, made by the program `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

AVAILABLE = shutil.which("openssl") is not None


def make_tls(folder: Path) -> str:
    """A folder with a certificate, and with that of the authority of its own that has signed it."""
    folder.mkdir(exist_ok=True)

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run(*new, "-x509", "-days", "2", "-subj", "/CN=CA", "-keyout", "ca.key", "-out", "ca.pem")
    run(*new, "-subj", "/CN=pool", "-keyout", "key.pem", "-out", "request.pem")
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    run("x509", "-req", "-in", "request.pem", *signing, "-out", "cert.pem")
    return str(folder)
