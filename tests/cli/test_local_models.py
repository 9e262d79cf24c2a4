"""The models in the cache, by name."""

from pathlib import Path

import pytest

from segue.checkpoint import bundled
from segue.checkpoint.gguf import convert
from segue.checkpoint.source import resolve
from segue.cli.local_models import installed_models
from tests.checkpoint import tiny, tiny_gguf


def test_the_bundled_model_comes_first_and_has_a_size_once_it_is_fetched(tmp_path: Path) -> None:
    (only,) = installed_models(tmp_path)
    assert (only.name, only.kind, only.num_bytes) == (bundled.NAME, "bundled, fetched at first use", None)
    only.path.parent.mkdir()
    only.path.write_bytes(b"1234")
    (only,) = installed_models(tmp_path)
    assert (only.name, only.kind, only.num_bytes) == (bundled.NAME, "bundled", 4)


def test_a_converted_model_has_the_name_of_its_file(tmp_path: Path) -> None:
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size(), num_hidden_layers=1)
    source = resolve(str(tiny_gguf.write(tmp_path / "tiny-q8.gguf", model)), "auto", tmp_path / "cache")
    _, found = installed_models(tmp_path / "cache")
    assert (found.name, found.kind, found.path) == ("tiny-q8", "converted", source.directory)
    assert found.num_bytes == sum(path.stat().st_size for path in source.directory.iterdir())


@pytest.mark.parametrize("config", ["{}", "damaged", "[]"])
def test_a_converted_model_without_a_name_is_called_by_its_hash(config: str, tmp_path: Path) -> None:
    for directory in (f"abc/{convert.FORMAT}", f"abc/.{convert.FORMAT}.unfinished"):
        (tmp_path / "converted" / directory).mkdir(parents=True)
        (tmp_path / "converted" / directory / "config.json").write_text(config)
    _, *found = installed_models(tmp_path)
    assert [model.name for model in found] == ["abc"]
