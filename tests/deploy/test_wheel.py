"""The wheel works in bare environments of each Python that Segue supports, made by pip and by uv.

pip installs torch for the Python of this process alone, and only if it is a build for CPUs: pip might take
builds for CUDA, which are gigabytes with their libraries. In the other environments everything but an
engine is tried, unless the variable TEST_WITH_TORCH is set. uv gets no torch of its own, as it might take
such builds: the environment that pip has made with the same interpreter lends its torch, by links and a
`.pth` file.
"""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from tests.support.child import start_child

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ("3.11", "3.12", "3.13")
LENT = ("torch", "triton", "nvidia-", "cuda-")  # packages that only torch needs, and that are large
NOT_ONES_OWN = ("PYTHON", "SEGUE_", "VIRTUAL_ENV", "PIP_REQUIRE", "UV_PROJECT")  # of this environment


def clean(**variables: str) -> dict[str, str]:
    """The variables of a user's shell: without those that point to this source tree and its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_ONES_OWN)}
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def run(*words: str | Path, **options: Any) -> str:
    """Run a command that must succeed, outside of the source tree, and return its output."""
    options = {"cwd": "/", "env": clean(), "timeout": 1200} | options
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def interpreter(version: str) -> Path | None:
    """The interpreter of this version, of those on the path and those of pyenv; None: there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    named = shutil.which(f"python{version}")
    candidates = [*([Path(named)] if named else []), *pyenv.glob(f"{version}.*/bin/python")]
    question = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for candidate in candidates:
        asked = subprocess.run([candidate, "-c", question], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.startswith(f"{version} "):
            return Path(asked.stdout.split()[1])
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs to it, since a build leaves files beside its sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    run(*build, "--wheel-dir", target, source, env=os.environ)
    (found,) = target.glob("segue-*.whl")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A bare environment with the wheel in it."""

    directory: Path
    variables: Mapping[str, str]
    has_torch: bool

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.directory.glob("lib/python*/site-packages")
        return found


@pytest.fixture(scope="module", params=SUPPORTED)
def by_pip(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"Python {request.param} is not installed here")
    directory = tmp_path_factory.mktemp(f"pip-{request.param}")
    run(python, "-m", "venv", directory)
    pip = [directory / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    has_torch = gets_torch(request.param)
    if has_torch:
        run(*pip, wheel)
    else:
        run(*pip, *needs_of(wheel))
        run(*pip, "--no-deps", wheel)
    return Environment(directory=directory, variables=clean(PATH="/usr/bin:/bin"), has_torch=has_torch)


def gets_torch(version: str) -> bool:
    """Whether environments of this Python get torch; see above."""
    is_own = version == "{}.{}".format(*sys.version_info)
    return "TEST_WITH_TORCH" in os.environ or (is_own and torch.version.cuda is None)


def needs_of(wheel: Path) -> list[str]:
    """What the wheel needs besides torch, without extras."""
    listed = metadata_of(wheel).get_all("Requires-Dist") or []
    return [text for text in listed if "extra ==" not in text and not text.startswith("torch")]


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """uv, installed from the index of pip, which also is uv's index unless it has one of its own."""
    directory = tmp_path_factory.mktemp("uv")
    run(sys.executable, "-m", "venv", directory)
    run(directory / "bin" / "pip", "install", "-q", "uv")
    return directory / "bin" / "uv"


def uv_variables(uv: Path) -> dict[str, str]:
    """The variables of a shell where uv is on the path, and knows the index that pip is configured with."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    index = {"UV_DEFAULT_INDEX": asked.stdout.strip()} if asked.returncode == 0 else {}
    own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
    return clean(PATH=f"{uv.parent}:/usr/bin:/bin", UV_PYTHON_DOWNLOADS="never", **(index | own))


def lend_torch(lender: Environment, directory: Path) -> list[str]:
    """Link an environment's torch, if it has one, into a directory; returns what else this torch needs."""
    needs: list[str] = []
    for package in importlib.metadata.distributions(path=[str(lender.packages)]):
        if package.name.lower().startswith(LENT):
            for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
                if not (directory / top).exists():
                    (directory / top).symlink_to(lender.packages / top)
        if package.name == "torch":
            listed = [text for text in package.requires or () if "extra ==" not in text]
            needs = [text for text in listed if not text.lower().startswith(LENT)]
    return needs


@pytest.fixture(scope="module")
def by_uv(
    by_pip: Environment, uv: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    base, lent = tmp_path_factory.mktemp("uv-env"), tmp_path_factory.mktemp("torch")
    made = Environment(directory=base / "env", variables=uv_variables(uv), has_torch=by_pip.has_torch)
    run(uv, "venv", "-q", "--python", by_pip.python.resolve(), made.directory, env=made.variables)
    needs = lend_torch(by_pip, lent)
    (made.packages / "torch.pth").write_text(f"{lent}\n")
    (base / "overrides.txt").write_text("torch ; python_version < '3'\n")  # which means: not at all
    install = [uv, "pip", "install", "-q", "--python", made.python, "--override", base / "overrides.txt"]
    run(*install, "-c", ROOT / "constraints.txt", wheel, *needs, env=made.variables)
    assert not (made.packages / "torch").exists() and not (made.packages / "pip").exists()
    return made


def served_reply(environment: Environment, cache: Path) -> str:
    """Start `segue serve` with the bundled model, ask it one question, and end it; returns the answer."""
    options = ["--port", "0", "--device", "cpu", "--num-kv-tokens", "512", "--log-level", "warning"]
    process = start_child(
        [environment.directory / "bin" / "segue", "serve", *options, "--cache-dir", cache],
        cwd="/",
        env=dict(environment.variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines: list[str] = []
        while not lines or "Ready" not in lines[-1]:
            line = process.stdout.readline()
            assert line, "".join(lines) + process.communicate()[1]
            lines.append(line)
        found = re.search(r"http://[\d.:]+", lines[-1])
        assert found is not None
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 16, "temperature": 0}
        request = urllib.request.Request(
            f"{found[0]}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        return str(answer)
    finally:
        process.kill()
        process.communicate()


def check(environment: Environment, cache: Path, fetched_with: str) -> None:
    """Try what a user does first: the version, the doctor, and a server that is asked one question."""
    command, variables = environment.directory / "bin" / "segue", dict(environment.variables)
    assert run(command, "--version", env=variables) == f"segue {segue.__version__}\n"
    assert "--attention-backend" in run(command, "serve", "--help", env=variables | {"COLUMNS": "200"})
    words = [command, "doctor", "--json", "--device", "cpu", "--port", "0", "--cache-dir", cache]
    doctor = subprocess.run(words, cwd="/", env=variables, capture_output=True, text=True, check=False)
    assert doctor.returncode == (0 if environment.has_torch else 1), doctor.stderr
    found = json.loads(doctor.stdout)
    findings = {each["name"]: each for section in found["sections"] for each in section["findings"]}
    assert found["can_serve"] == environment.has_torch
    assert fetched_with in findings["bundled model"]["value"]
    if not environment.has_torch:
        assert [name for name, each in findings.items() if each.get("status") == "failed"] == ["torch"]
        return
    assert findings["attention backend"]["value"] == "cpu"
    assert "Paris" in served_reply(environment, cache)
    assert list((cache / "bundled").glob("*.gguf"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_serves_the_bundled_model_in_an_environment_of_pip(by_pip: Environment, tmp_path: Path) -> None:
    if by_pip.has_torch:
        run(by_pip.python, "-m", "pip", "check")
    check(by_pip, tmp_path, "-m pip")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_serves_the_bundled_model_in_an_environment_of_uv(by_uv: Environment, tmp_path: Path) -> None:
    check(by_uv, tmp_path, "uv tool run")


@pytest.mark.slow
def test_it_has_every_file_of_the_package_and_the_metadata_of_an_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    found = metadata_of(wheel)
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "segue").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= names
    assert found["Description-Content-Type"] == "text/markdown"
    classifiers = found.get_all("Classifier") or []
    for version in SUPPORTED:
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert set(found.get_all("Provides-Extra") or []) >= {"fa3", "nixl", "etcd", "kubernetes", "all"}
