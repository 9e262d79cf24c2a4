import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from segue.errors import ModelFileError, UnsupportedModelError
from segue.weights import convert
from tests.frontend.test_tokenizer import MESSAGES, TEXTS, assert_same
from tests.weights import tiny, tiny_gguf


def write(directory: Path, kind: str = "llama", **how: Any) -> Path:
    model = tiny.make(kind, num_hidden_layers=1, vocab_size=tiny_gguf.vocab_size())
    return tiny_gguf.write(directory / "tiny.gguf", model, **how)


def test_the_directory_is_named_by_the_files_hash(tmp_path: Path) -> None:
    directory = convert.convert(write(tmp_path), tmp_path / "cache")
    assert re.fullmatch(f"{tmp_path}/cache/converted/[0-9a-f]{{64}}/{convert.FORMAT}", str(directory))


def test_the_directory_has_configs_and_tokenizer(tmp_path: Path) -> None:
    directory = convert.convert(write(tmp_path), tmp_path / "cache")
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert "eos_token_id" in json.loads((directory / "generation_config.json").read_text())
    assert (directory / "tokenizer.json").exists()
    assert (directory / "chat_template.jinja").read_text() == tiny_gguf.TEMPLATE


def test_a_moved_file_is_not_converted_again(tmp_path: Path) -> None:
    path = write(tmp_path)
    directory = convert.convert(path, tmp_path / "cache")
    before = (directory / "config.json").stat().st_mtime_ns
    assert convert.convert(path.rename(tmp_path / "moved.gguf"), tmp_path / "cache") == directory
    assert (directory / "config.json").stat().st_mtime_ns == before


def test_a_file_without_tokenizer_is_converted_without(tmp_path: Path) -> None:
    directory = convert.convert(write(tmp_path, tokenizer=None), tmp_path / "cache")
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "generation_config.json"]


def test_an_unknown_tokenizer_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, tokenizer=None, extra={"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(ModelFileError, match=f"{path}: its tokenizer cannot be converted"):
        convert.convert(path, tmp_path / "cache")


def test_an_unsupported_architecture_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, extra={"llama.expert_count": 8})
    with pytest.raises(UnsupportedModelError):
        convert.convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache" / "converted").exists()


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [("llama", "gpt2"), ("llama", "llama"), ("qwen2", "gpt2"), ("qwen3", "gpt2"), ("qwen3-moe", "gpt2")],
)
def test_the_tokenizer_is_what_transformers_makes_of_the_file(
    kind: str, tokenizer: str, flags: dict[str, bool], tmp_path: Path
) -> None:
    extra = {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
    path = write(tmp_path, kind, tokenizer=tokenizer, extra=extra)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert_same(convert.convert(path, tmp_path / "cache"), theirs, TEXTS, MESSAGES)


def test_the_bundled_models_tokenizer_is_what_transformers_makes_of_the_file(
    bundled_path: Path, tmp_path: Path
) -> None:
    theirs = AutoTokenizer.from_pretrained(bundled_path.parent, gguf_file=bundled_path.name)
    assert_same(convert.convert(bundled_path, tmp_path), theirs, TEXTS, MESSAGES)
