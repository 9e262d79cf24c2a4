"""The models in the cache, by name."""

from pathlib import Path

import pytest

from segue.checkpoint import bundled
from segue.checkpoint.gguf import convert
from segue.checkpoint.source import resolve
from segue.cli.main import installed_models
from tests.checkpoint import tiny, tiny_gguf


def test_the_bundled_model_comes_first_and_has_a_size_once_it_is_fetched(tmp_path: Path) -> None:
    ((*found, path),) = installed_models(tmp_path)
    assert found == [bundled.NAME, "bundled, fetched at first use", None]
    path.parent.mkdir()
    path.write_bytes(b"1234")
    assert list(installed_models(tmp_path)) == [(bundled.NAME, "bundled", 4, path)]


def test_a_converted_model_has_the_name_of_its_file(tmp_path: Path) -> None:
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size(), num_hidden_layers=1)
    source = resolve(str(tiny_gguf.write(tmp_path / "tiny-q8.gguf", model)), "auto", tmp_path / "cache")
    _, found = installed_models(tmp_path / "cache")
    num_bytes = sum(path.stat().st_size for path in source.directory.iterdir())
    assert found == ("tiny-q8", "converted", num_bytes, source.directory)


@pytest.mark.parametrize("config", ["{}", "damaged", "[]"])
def test_a_converted_model_without_a_name_is_called_by_its_hash(config: str, tmp_path: Path) -> None:
    for directory in (f"abc/{convert.FORMAT}", f"abc/.{convert.FORMAT}.unfinished"):
        (tmp_path / "converted" / directory).mkdir(parents=True)
        (tmp_path / "converted" / directory / "config.json").write_text(config)
    _, *found = installed_models(tmp_path)
    assert [name for name, *_ in found] == ["abc"]
