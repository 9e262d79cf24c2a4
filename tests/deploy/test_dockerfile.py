"""The Dockerfile, which is checked by reading alone: tests build no images."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.test_manifests import pod

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = Path(sys.executable).with_name("hadolint")


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True, timeout=60)


def test_hadolint_finds_nothing() -> None:
    found = lint(ROOT / "Dockerfile")
    assert (found.returncode, found.stdout) == (0, "")


def test_hadolint_finds_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text((ROOT / "Dockerfile").read_text() + "RUN cd /src && sudo ls\n")
    assert "DL3004" in lint(wrong).stdout


def test_there_is_an_image_for_cpus_and_one_for_gpus() -> None:
    text = (ROOT / "Dockerfile").read_text()
    targets = re.findall(r"^FROM runtime AS (\w+)$", text, re.MULTILINE)
    assert targets == ["cpu", "cuda"]
    assert f"USER {pod()['securityContext']['runAsUser']}:" in text, "the user of the manifests"


def test_what_the_dockerfile_copies_and_installs_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists() and f"!{source.removeprefix('./')}" in ignored
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"'?\.\[([^\]]*)\]", text):
        assert set(names.split(",")) <= extras.keys()


@pytest.mark.parametrize("stage", ["built-cpu", "built-cuda", "runtime"])
def test_each_stage_that_is_used_exists(stage: str) -> None:
    assert f" AS {stage}\n" in (ROOT / "Dockerfile").read_text()
