import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from segue.checkpoint import bundled, hub
from segue.checkpoint.source import ModelSource, resolve, resolve_weights, tokenizer_files
from segue.errors import ModelFileError, UnsupportedModelError
from tests.checkpoint import tiny, tiny_gguf


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-llama"
    path.mkdir()
    with torch.device("meta"):
        return tiny.save_config(tiny.make("llama"), path)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size(), num_hidden_layers=1)
    return tiny_gguf.write(tmp_path / "tiny-q8.gguf", model)


def find(
    model: Path | str | None, cache_dir: Path = Path("/nonexistent"), load_format: Any = "auto"
) -> ModelSource:
    return resolve(None if model is None else str(model), load_format, cache_dir)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


def test_a_directory_is_a_safetensors_checkpoint(directory: Path) -> None:
    source = find(directory)
    assert (source.name, source.format, source.directory, source.gguf) == (
        "tiny-llama",
        "safetensors",
        directory,
        None,
    )
    assert source.config.num_heads == 6
    assert source.config.architecture == "LlamaForCausalLM"
    assert (source.model_type, source.architectures) == ("llama", ("LlamaForCausalLM",))


def test_a_directory_may_have_no_tokenizer(directory: Path) -> None:
    assert find(directory).tokenizer_directory is None
    (directory / "tokenizer.json").touch()
    assert find(directory).tokenizer_directory == directory


def test_dummy_weights_need_only_a_config(directory: Path) -> None:
    assert find(directory, load_format="dummy").format == "dummy"


def test_a_gguf_file_is_converted_into_the_cache(gguf_file: Path, tmp_path: Path) -> None:
    source = find(gguf_file, tmp_path / "cache")
    assert (source.name, source.format, source.gguf) == ("tiny-q8", "gguf", gguf_file)
    assert source.directory.is_relative_to(tmp_path / "cache")
    assert source.tokenizer_directory == source.directory
    assert (source.model_type, source.architectures) == ("llama", ("LlamaForCausalLM",))


def test_dummy_weights_can_have_the_config_of_a_gguf_file(gguf_file: Path, tmp_path: Path) -> None:
    source = find(gguf_file, tmp_path / "cache", "dummy")
    assert source.format == "dummy"
    tiny.load_source(source)


def test_a_directory_with_a_single_gguf_file_stands_for_that_file(gguf_file: Path, tmp_path: Path) -> None:
    assert find(gguf_file.parent, tmp_path / "cache").gguf == gguf_file


def test_a_directory_with_several_gguf_files_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelFileError, match=r"2 GGUF files; name one of them: other.gguf, tiny-q8.gguf"):
        find(tmp_path)


def test_the_load_format_chooses_between_gguf_and_safetensors(
    directory: Path, gguf_file: Path, tmp_path: Path
) -> None:
    gguf_file = gguf_file.rename(directory / gguf_file.name)
    assert find(directory).gguf is None
    assert find(directory, tmp_path / "cache", "gguf").gguf == gguf_file


def test_a_gguf_file_is_no_safetensors_checkpoint(gguf_file: Path) -> None:
    with pytest.raises(ModelFileError, match=r"is a file; the load format 'safetensors' needs"):
        find(gguf_file, load_format="safetensors")


def test_a_directory_without_gguf_file_is_no_gguf_model(directory: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no \*.gguf file; the load format 'gguf'"):
        find(directory, load_format="gguf")


def test_the_default_model_is_the_bundled_one(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "ensure_bundled_model", lambda cache_dir: gguf_file)
    source = find(None, tmp_path / "cache")
    assert (source.name, source.gguf) == ("SmolLM2-135M-Instruct", gguf_file)


def test_a_hub_id_is_fetched(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, bool, str | None]] = []

    def fetch(model: str, *, weights: bool, revision: str | None) -> Path:
        fetched.append((model, weights, revision))
        return directory

    monkeypatch.setattr(hub, "fetch", fetch)
    source = find("someone/tiny-llama")
    find("someone/tiny-llama", load_format="dummy")
    assert (source.name, source.directory) == ("someone/tiny-llama", directory)
    resolve("someone/tiny-llama", "auto", "/nonexistent", revision="v2")
    name = "someone/tiny-llama"
    assert fetched == [(name, True, None), (name, False, None), (name, True, "v2")]


def test_only_models_of_the_hub_have_revisions(directory: Path) -> None:
    for model, said in ((str(directory), "model "), (None, "the bundled model")):
        with pytest.raises(ModelFileError, match=f"revision='v2': {said}.*leave --revision out"):
            resolve(model, "auto", "/nonexistent", revision="v2")


def test_new_weights_in_a_local_directory_of_the_repositorys_name_have_no_revision(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = find(directory).config
    monkeypatch.chdir(directory.parent)
    found = resolve_weights(directory.name, "auto", "/nonexistent", served, revision="v2")
    assert found.directory == directory
    with pytest.raises(ModelFileError, match="leave --revision out"):
        resolve(directory.name, "auto", "/nonexistent", revision="v2")


def test_a_tokenizer_of_another_place(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "fetch", lambda name, *, weights: directory if not weights else None)
    (directory / "tokenizer.json").touch()
    assert tokenizer_files(str(directory)) == tokenizer_files("owner/name") == directory
    (tmp_path / "empty").mkdir()
    for wrong, said in (
        (tmp_path / "empty", "the directory has none of"),
        (tmp_path / "no", "give a directory"),
    ):
        with pytest.raises(ModelFileError, match=said):
            tokenizer_files(str(wrong))


@pytest.mark.parametrize(
    "model",
    [
        "./no/such",
        "/no/such",
        "no.gguf",
        "a/b/c",
        "someone/no.gguf",
        "~/no such",
        "~nobody-of-this-name/x",
        "",
    ],
)
def test_a_path_that_does_not_exist_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=f"model '{model}' does not exist"):
        find(model)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"{tmp_path / 'config.json'} is missing"):
        find(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_corrupt_config_is_named(directory: Path, text: str) -> None:
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=f"{directory / 'config.json'} is corrupt"):
        find(directory)


def test_an_unsupported_architecture_lists_the_supported(directory: Path) -> None:
    change(directory / "config.json", architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        UnsupportedModelError, match=r"'GPT2LMHeadModel' is not supported; .*LlamaForCausalLM"
    ):
        find(directory)


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(2, None, (2,)), (2, 7, (7,)), (2, [7, 9], (7, 9)), (None, None, ()), ([3, 4], None, (3, 4))],
)
def test_eos_token_ids_come_from_generation_config_first(
    directory: Path, own: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    change(directory / "config.json", eos_token_id=own)
    if generation is not None:
        change(directory / "generation_config.json", eos_token_id=generation)
    assert find(directory).eos_token_ids == expected


@pytest.mark.parametrize("wrong", ["2", -1, [None], [2, "3"], True, {}])
def test_invalid_eos_token_ids_are_an_error(directory: Path, wrong: Any) -> None:
    change(directory / "generation_config.json", eos_token_id=wrong)
    with pytest.raises(ModelFileError, match="the model's eos_token_id is"):
        find(directory)


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_parameters", "architectures"])
def test_a_config_field_of_the_wrong_kind_is_corrupt(directory: Path, field: str) -> None:
    change(directory / "config.json", **{field: [1, 2] if field != "architectures" else 5})
    with pytest.raises(ModelFileError, match="a field has a value of the wrong kind"):
        find(directory)


def test_a_deeply_nested_config_is_corrupt(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFileError, match=r"config.json is corrupt"):
        find(directory)


def test_importing_source_imports_neither_torch_nor_gguf() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['gguf'] = None; import segue.checkpoint.source, "
        "segue.frontend.tokenizer"
    )
    source = Path(segue.__path__[0]).parent
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
