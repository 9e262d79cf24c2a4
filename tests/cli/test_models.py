"""``segue models`` with the real library of the hub, and a local server in place of the hub."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from segue.cli.models import models_app
from segue.errors import ModelFileError
from tests.support.child import start_child
from tests.support.fake_hub import FakeHub, commit_of

# The library reads its settings when it is imported, so it needs a process of its own: it runs a command per
# line of its input.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from segue.cli.models import models_app
for line in sys.stdin:
    result = CliRunner().invoke(models_app, json.loads(line))
    print(json.dumps([result.exit_code, result.stdout, str(result.exception or "")]), flush=True)
"""
WEIGHTS = random.Random(1).randbytes(12 << 20)  # more than the library writes at once
REPOSITORIES = {
    "owner/tiny": {
        "main": {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "notes.md": b"not fetched"},
        "v1": {"config.json": b'{"a": 0}', "model.safetensors": WEIGHTS},
    },
    "owner/files": {"main": {"tiny-Q4_K_M.gguf": b"4" * 5000, "tiny-Q8_0.gguf": b"8" * 5000}},
}


class Models:
    """Runs `segue models` with a hub."""

    def __init__(self, home: Path, hub: FakeHub) -> None:
        self.hub = hub
        self.cache = home / "hub"
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "COLUMNS": "300"}
        own |= {"SEGUE_CACHE_DIR": str(home / "segue"), "HF_HUB_ETAG_TIMEOUT": "2"}
        self.process: subprocess.Popen[str] = start_child(
            [sys.executable, "-c", COMMANDS],
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *words: str) -> str:
        """Returns what a command prints."""
        code, output, error = self._run(words)
        assert (code, error) == (0, ""), error
        return str(output)

    def error_of(self, *words: str) -> str:
        """Returns the error of a command that fails."""
        code, output, error = self._run(words)
        assert (code, output) == (1, "")
        return str(error)

    def _run(self, words: tuple[str, ...]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with FakeHub(REPOSITORIES) as hub:
        found = Models(tmp_path_factory.mktemp("hub"), hub)
        yield found
        found.process.kill()
        found.process.communicate()


def test_models_of_the_hub_are_fetched_checked_and_removed(models: Models) -> None:
    hub, snapshots = models.hub, models.cache / "models--owner--tiny" / "snapshots"
    hub.broken.add("model.safetensors")
    fault = models.error_of("pull", "owner/tiny")
    assert re.search("'owner/tiny' cannot be fetched now: .* answered 500.*fetches the others", fault)
    assert "'owner/tiny' is not here completely" in models.error_of("path", "owner/tiny")
    hub.broken.clear()
    hub.sent.clear()
    hub.cut_after = 11 << 20
    path = snapshots / commit_of("owner/tiny", "main")
    assert models.run("pull", "owner/tiny") == f"{path}\n"
    # The library writes 10 MiB at once, and asks for the rest.
    assert hub.sent == [("model.safetensors", 0), ("model.safetensors", 10 << 20)]
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and not (path / "notes.md").exists()
    assert models.run("path", "owner/tiny") == f"{path}\n"
    assert "every file has its checksum" in models.run("verify", "owner/tiny")

    weights = (path / "model.safetensors").resolve()
    with weights.open("r+b") as file:
        file.write(b"damage")
    (path / "config.json").resolve().write_text('{"a": 2}')
    fault = models.error_of("verify", "owner/tiny")
    assert re.search(r"config\.json has another hash.*model\.safetensors has another SHA-256.*--again", fault)
    models.run("pull", "owner/tiny", "--again")
    models.run("verify", "owner/tiny")

    other = models.run("pull", "owner/tiny", "--revision", "v1").strip()
    assert json.loads((Path(other) / "config.json").read_text()) == {"a": 0}
    assert models.run("path", "owner/tiny", "--revision", "v1").strip() == other
    assert models.run("path", "owner/tiny") == f"{path}\n"
    file = models.run("pull", "owner/files:q8_0").strip()
    assert file.endswith("tiny-Q8_0.gguf") and Path(file).read_bytes() == b"8" * 5000
    listed = models.run("list")
    assert re.search(r"owner/files:Q8_0 +hub +0 MiB", listed)
    assert len(re.findall(r"owner/tiny +hub +12 MiB", listed)) == 2

    assert models.run("rm", "owner/tiny", "--revision", "v1") == f"removed {other}, 12 MiB\n"
    models.run("verify", "owner/tiny")  # it has the same weights
    models.run("rm", "owner/tiny")
    assert not snapshots.parent.exists()
    assert "owner/tiny" not in models.run("list")
    assert "pull owner/tiny` fetches it" in models.error_of("path", "owner/tiny")


def test_what_the_hub_has_not_is_a_clear_error(models: Models) -> None:
    assert "'owner/none' is neither" in models.error_of("pull", "owner/none")
    assert "no revision 'v2'" in models.error_of("pull", "owner/tiny", "--revision", "v2")
    wrong = models.error_of("pull", "owner/files:Q2_K")
    assert "no GGUF file of quantization 'Q2_K'; it has tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in wrong
    assert "as owner/files:Q4_K_M; there are tiny-Q4" in models.error_of("pull", "owner/files")


@pytest.mark.parametrize("name", ["a b", "owner/name:", "./x", "name:Q4"])
def test_a_name_that_is_no_hub_id_is_refused(name: str) -> None:

    with pytest.raises(ModelFileError, match="is no hub id"):
        CliRunner().invoke(models_app, ["pull", name], catch_exceptions=False)
