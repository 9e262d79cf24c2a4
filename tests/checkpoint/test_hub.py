from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from segue.checkpoint import hub, model_files
from segue.errors import ModelFileError
from tests.support import fake_hub


@pytest.mark.parametrize("model", ["gpt2", "owner/name", "Qwen/Qwen3-0.6B", "a_b/c.d-e"])
def test_this_is_a_repository_id(model: str) -> None:
    assert hub.is_repository_id(model)


@pytest.mark.parametrize(
    "model", ["", ".", "..", "./a", "/a/b", "a/b/c", "a b", "a/", "~/a", "a\nb", ".hidden/x"]
)
def test_this_is_no_repository_id(model: str) -> None:
    assert not hub.is_repository_id(model)


@pytest.mark.parametrize("name", ["tiny-q4_k_m.gguf", "tiny.Q4_K_M.gguf", "sub/Q4_K_M.gguf", "Q4_K_M.gguf"])
def test_a_quantization_names_one_gguf_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (name, "tiny-IQ4_K_M.gguf", "tiny-Q4_K.gguf", "tiny-Q4_K_M.gguf.txt"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.fetch("owner/name:Q4_K_M", weights=True) == tmp_path / name
    assert hub.cached("owner/name:q4_k_m") == tmp_path / name
    (tmp_path / "other-Q4_K_M.gguf").write_text("")
    with pytest.raises(ModelFileError, match="could be any of"):
        hub.fetch("owner/name:Q4_K_M", weights=True)


@pytest.mark.parametrize(
    ("model", "is_id"), [("a/b:Q8_0", True), ("a/b:", False), ("b:Q8_0", False), ("a/b:c:d", False)]
)
def test_a_quantization_needs_an_owner_and_a_name(model: str, is_id: bool) -> None:
    assert (hub.parse_id(model) is not None) == is_id


class FakeHub:
    """Stands in for `snapshot_download`: returns a path, or raises an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
        self.answer = answer
        self.patterns: list[str] = []
        self.revision: str | None = None
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(
        self,
        model: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("it is not here")
        self.patterns, self.revision = allow_patterns, revision
        if isinstance(self.answer, Exception):
            raise self.answer
        return f"{self.answer}/{model}"


def test_fetch_returns_the_local_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, "/hub")
    assert hub.fetch("owner/name", weights=True) == Path("/hub/owner/name")
    assert "*.safetensors" in fake.patterns


def test_fetch_without_weights_does_not_download_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, "/hub")
    hub.fetch("owner/name", weights=False)
    assert "*.safetensors" not in fake.patterns
    assert "*.json" in fake.patterns


def test_a_revision_is_passed_on_and_an_unknown_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(monkeypatch, "/hub")
    hub.fetch("owner/name", weights=True, revision="v2")
    assert fake.revision == "v2"
    FakeHub(monkeypatch, not_found(RevisionNotFoundError))
    with pytest.raises(ModelFileError, match=r"model 'owner/name' has no revision 'v2'"):
        hub.fetch("owner/name", weights=True, revision="v2")


def not_found(kind: type[HfHubHTTPError]) -> Exception:
    response: Any = type("Response", (), {"headers": {}, "request": None, "status_code": 404, "url": ""})()
    return kind("404 Client Error.\nmore", response=response)


def test_an_unknown_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, not_found(RepositoryNotFoundError))
    with pytest.raises(ModelFileError, match=r"model 'owner/name' is neither .*Check the name"):
        hub.fetch("owner/name", weights=True)


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("offline"), OSError("no route"), ConnectionError("x")]
)
def test_without_a_network_the_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    FakeHub(monkeypatch, error)
    with pytest.raises(ModelFileError, match=r"'owner/name' .* cannot be reached .*`segue models pull owner"):
        hub.fetch("owner/name", weights=True)


def test_the_real_library_offline_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run with HF_HUB_OFFLINE, so nothing is sent to the network.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFileError, match="cannot be reached"):
        hub.fetch("segue-tests/there-is-no-such-model", weights=True)


def test_the_process_that_fetches_for_an_update_gets_the_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revisions = {name: {"config.json": f'{{"is": "{name}"}}'.encode()} for name in ("main", "v2")}
    with fake_hub.FakeHub({"owner/tiny": revisions}) as server:
        own = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        with model_files.reading(model_files.Reading(is_cancelled=lambda: False)):
            for revision, name in (("v2", "v2"), (None, "main")):
                found = hub.fetch("owner/tiny", weights=True, revision=revision)
                assert name in (found / "config.json").read_text()
