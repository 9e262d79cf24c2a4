"""Certificates for tests, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def openssl(*words: str) -> None:
    """Runs the program; a machine without it has no such tests."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def make_certificate(path: Path) -> Path:
    """Makes a certificate for 127.0.0.1, beside its key (`.key`); nobody but itself vouches for it."""
    kind = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    openssl(*kind.split(), *names, "-keyout", str(path.with_suffix(".key")), "-out", str(path))
    return path


def tls_options(certificate: Path) -> dict[str, str]:
    """Returns the options of a server that has the certificate."""
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(certificate.with_suffix(".key"))}
