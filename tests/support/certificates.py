"""Certificates for tests of encrypted connections, made by the program `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from fastq_loader.extras.remote.connection import Tls

AVAILABLE = shutil.which("openssl") is not None


def make_tls(folder: Path, name: str = "pool") -> Tls:
    """An authority of its own, and a certificate that it has signed."""

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = f"-keyout {name}-ca.key -out {name}-ca".split()
    run(*new, "-x509", "-days", "2", "-subj", f"/CN={name} CA", *files)
    run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    signing = ["-CA", f"{name}-ca", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-days", "2"]
    run("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return Tls(*(str(folder / file) for file in (f"{name}.pem", f"{name}.key", f"{name}-ca")))
