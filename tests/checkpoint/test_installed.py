"""The models on this machine, by name; those of the hub's cache are tested in tests/cli/test_models.py."""

from pathlib import Path

import pytest

from segue.checkpoint import bundled, hub
from segue.checkpoint.gguf import convert
from segue.checkpoint.installed import InstalledModel, find_faults, installed_models, remove
from segue.checkpoint.source import resolve
from tests.checkpoint import tiny, tiny_gguf


@pytest.fixture(autouse=True)
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cache_directory", lambda: tmp_path / "hub")


def test_the_bundled_model_comes_first_and_has_a_size_once_it_is_fetched(tmp_path: Path) -> None:
    (found,) = installed_models(tmp_path)
    assert (found.name, found.kind, found.num_bytes) == (bundled.NAME, "bundled", None)
    found.path.parent.mkdir()
    found.path.write_bytes(b"1234")
    (found,) = installed_models(tmp_path)
    assert found.num_bytes == 4
    assert list(find_faults(found)) == [f"{bundled.FILE} has another SHA-256 than was published"]
    remove(found)
    assert not found.path.exists()


def test_a_converted_model_has_the_name_of_its_file(tmp_path: Path) -> None:
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size(), num_hidden_layers=1)
    source = resolve(str(tiny_gguf.write(tmp_path / "tiny-q8.gguf", model)), "auto", tmp_path / "cache")
    _, found = installed_models(tmp_path / "cache")
    num_bytes = sum(path.stat().st_size for path in source.directory.iterdir())
    assert found == InstalledModel(
        name="tiny-q8", kind="converted", num_bytes=num_bytes, path=source.directory
    )
    assert list(find_faults(found)) == []
    (source.directory / "config.json").write_text("{}")
    assert list(find_faults(found)) == ["config.json differs from what was written"]
    remove(found)
    assert list((tmp_path / "cache" / "converted").iterdir()) == []


@pytest.mark.parametrize("config", ["{}", "damaged", "[]"])
def test_a_converted_model_without_a_name_is_called_by_its_hash(config: str, tmp_path: Path) -> None:
    for directory in (f"abc/{convert.FORMAT}", f"abc/.{convert.FORMAT}.unfinished"):
        (tmp_path / "converted" / directory).mkdir(parents=True)
        (tmp_path / "converted" / directory / "config.json").write_text(config)
    _, *found = installed_models(tmp_path)
    assert [each.name for each in found] == ["abc"]
