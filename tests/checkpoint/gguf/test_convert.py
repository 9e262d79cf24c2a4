import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from segue.checkpoint.gguf import convert
from segue.checkpoint.source import resolve
from segue.errors import ModelFileError, UnsupportedModelError
from segue.frontend.tokenizer import Tokenizer
from tests.checkpoint import tiny, tiny_gguf
from tests.fixtures import make_tokenizers
from tests.fixtures.prompts import PROMPTS
from tests.frontend.test_tokenizer import MESSAGES, assert_same

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


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


CONVERTED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
LOCK = f".{convert.RECORD}.lock"


@pytest.mark.parametrize("how", ["corrupt", "cut", "gone"])
@pytest.mark.parametrize("name", [*CONVERTED, convert.RECORD])
def test_a_damaged_file_is_converted_again_and_the_others_stay(
    name: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache_dir = write(tmp_path), tmp_path / "cache"
    directory = convert.convert(path, cache_dir)
    assert not caplog.records
    (directory / "weights-float32.safetensors").write_text("made by others")
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert set(before) == {*CONVERTED, convert.RECORD, "weights-float32.safetensors", LOCK}
    content = before[name]
    match how:
        case "corrupt":
            (directory / name).write_bytes(content[:5] + b"\xff" + content[6:])
        case "cut":
            (directory / name).write_bytes(content[:-1])
        case "gone":
            (directory / name).unlink()
    for _ in range(2):
        assert convert.convert(path, cache_dir) == directory
        assert {file.name: file.read_bytes() for file in directory.iterdir()} == before
    (record,) = caplog.records
    assert f"{directory} is damaged: {name} " in record.getMessage()


def test_a_corrupt_config_in_the_cache_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path)
    directory = resolve(str(path), "auto", tmp_path / "cache").directory
    (directory / "config.json").write_text('{"architectures": ')
    source = resolve(str(path), "auto", tmp_path / "cache")
    assert source.config.architecture == "LlamaForCausalLM"


def test_the_next_conversion_removes_files_of_a_killed_one(tmp_path: Path) -> None:
    path, cache_dir = write(tmp_path), tmp_path / "cache"
    directory = convert.convert(path, cache_dir)
    left = directory / f".{convert.RECORD}.abc123"  # as test_cache.py finds it after a kill
    left.mkdir()
    for name in (*CONVERTED, convert.RECORD):
        (directory / name).rename(left / name)
    assert convert.convert(path, cache_dir) == directory
    assert sorted(os.listdir(directory)) == sorted([LOCK, *CONVERTED, convert.RECORD])


def test_a_file_without_tokenizer_gives_no_tokenizer_files(tmp_path: Path) -> None:
    directory = convert.convert(write(tmp_path, tokenizer=None), tmp_path / "cache")
    assert sorted(path.name for path in directory.iterdir()) == [
        LOCK,
        "checksums.json",
        "config.json",
        "generation_config.json",
    ]


def test_an_unsupported_architecture_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, extra={"llama.expert_count": 8})
    with pytest.raises(UnsupportedModelError):
        convert.convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache" / "converted").exists()


@pytest.mark.parametrize(
    "how",
    [
        {"tokenizer": None, "extra": {"tokenizer.ggml.tokens": 7, "llama.vocab_size": None}},
        {
            "tensors": {"rope_freqs.weight": np.ones(4, np.float32)},
            "extra": {"llama.rope.freq_base": "high"},
        },
    ],
    ids=["tokens", "freq_base"],
)
def test_metadata_of_the_wrong_kind_is_corrupt_and_leaves_nothing_behind(
    how: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, **how)
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: its metadata has a value of the wrong"):
        convert.convert(path, tmp_path / "cache")
    assert not (tmp_path / "cache" / "converted").exists()


@pytest.mark.parametrize("name", ["bundled", *make_tokenizers.CASES])
def test_the_tokenizer_equals_the_stored_one_with_any_version_of_transformers(
    name: str, tmp_path: Path
) -> None:
    ours = Tokenizer.load(convert.convert(make_tokenizers.write(tmp_path, name), tmp_path / "cache"))
    (eos_id,) = ours.eos_ids
    found = make_tokenizers.described(ours.backend, ours.bos_id, eos_id)
    assert found == json.loads(make_tokenizers.STORED.read_text())[name]


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in CONSTRAINTS.read_text().splitlines(),
    reason="versions of transformers read a GGUF vocabulary differently; the pinned one is the reference",
)
@pytest.mark.parametrize("name", ["bundled", *make_tokenizers.CASES])
def test_the_tokenizer_equals_the_one_that_transformers_reads(name: str, tmp_path: Path) -> None:
    path = make_tokenizers.write(tmp_path, name)
    texts = [*make_tokenizers.MORE_TEXTS, *(prompt.text for prompt in PROMPTS if prompt.text)]
    theirs = make_tokenizers.theirs(path)
    assert_same(convert.convert(path, tmp_path / "cache"), theirs, texts, MESSAGES)


@pytest.mark.parametrize("pre", ["martian", None])
def test_an_unknown_pre_tokenizer_is_an_error_that_lists_the_supported(
    pre: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path, extra={"tokenizer.ggml.pre": pre})
    expected = f"{path} has pre-tokenizer {pre!r} .*llama-bpe.*gguf-new-metadata --pre-tokenizer NAME"
    with pytest.raises(ModelFileError, match=expected):
        convert.convert(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"tokenizer.ggml.model": "rwkv"},
            "has tokenizer kind 'rwkv' .*supported in GGUF files: gpt2, llama",
        ),
        ({"tokenizer.ggml.merges": None}, "no metadata key 'tokenizer.ggml.merges'"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "its tokenizer cannot be converted"),
        ({"tokenizer.ggml.merges": "x"}, "its tokenizer cannot be converted"),
        ({"tokenizer.ggml.token_type": 1}, "its tokenizer cannot be converted"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "no metadata key 'tokenizer.ggml.bos_token_id'",
        ),
    ],
)
def test_a_broken_tokenizer_is_an_error_that_names_the_file(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, extra=extra)
    with pytest.raises(ModelFileError, match=f"{path}:? .*{message}"):
        convert.convert(path, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "converted").rglob("*.json"))


def test_a_control_token_beyond_the_byte_alphabet_keeps_its_id(tmp_path: Path) -> None:
    token = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"  # DeepSeek's
    path = write(tmp_path, specials=[token])
    ours = Tokenizer.load(convert.convert(path, tmp_path / "cache"))
    assert ours.encode(token) == [tiny_gguf.vocab_size()]
    assert ours.vocab_size == tiny_gguf.vocab_size() + 1


def test_a_sentencepiece_file_without_prefix_space_gets_none(tmp_path: Path) -> None:
    path = write(tmp_path, tokenizer="llama", extra={"tokenizer.ggml.add_space_prefix": False})
    ours = Tokenizer.load(convert.convert(path, tmp_path / "cache"))
    pieces = [ours.backend.id_to_token(index) for index in ours.encode("hello wo")]
    assert pieces == ["<s>", "hello", "▁wo"]
    assert ours.decode(ours.encode(" hello")) == " hello"


def test_the_locale_does_not_change_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{# \N{LATIN SMALL LETTER E WITH ACUTE} \N{BLACK RIGHT-POINTING TRIANGLE} #}"
    monkeypatch.setattr(tiny_gguf, "TEMPLATE", template)
    program = """
        import sys
        from pathlib import Path
        from segue.checkpoint import source
        from segue.checkpoint.gguf import convert
        directory = convert.convert(Path(sys.argv[1]), Path(sys.argv[2]))
        source.read_json(directory / "config.json")
        print(directory)
    """
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", textwrap.dedent(program), str(write(tmp_path)), str(tmp_path / "cache")]
    result = subprocess.run(
        command, env=os.environ | ascii_only, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    written = Path(result.stdout.strip()) / "chat_template.jinja"
    assert written.read_text(encoding="utf-8") == template


def test_a_tokenizer_is_converted_without_transformers_or_torch(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        sys.modules["transformers"] = sys.modules["torch"] = None  # importing one now raises ImportError
        from segue.checkpoint.gguf import convert
        print(convert.convert(Path(sys.argv[1]), Path(sys.argv[2])))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(write(tmp_path)), str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert (Path(result.stdout.strip()) / "tokenizer.json").exists()
