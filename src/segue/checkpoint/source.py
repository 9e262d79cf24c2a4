"""Resolves the name that a user gives a model to the model's files, without torch and without weights."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from segue.checkpoint import bundled, hub, model_files
from segue.config import EngineConfig, LoadFormat, Quantization
from segue.errors import ModelFileError
from segue.models.config import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's files and configuration."""

    name: str  # short, for display; also the default name that clients use
    format: Literal["safetensors", "gguf", "dummy"]  # of the weights
    directory: Path  # has config.json; for a GGUF file, the directory converted from it
    gguf: Path | None
    tokenizer_directory: Path | None  # None: the model has no tokenizer, so requests must give token ids
    config: ModelConfig
    model_type: str | None  # of config.json; None: it names none
    architectures: tuple[str, ...]  # of config.json: names of transformers' classes
    eos_token_ids: tuple[int, ...]  # of generation_config.json, else config.json

    def tokenizer_digest(self) -> str:
        """Return the SHA-256 of the tokenizer's file; "" without one, or if it is not one file of JSON.

        Engines with equal ones turn the same text into the same ids. Reading it takes up to 100 ms, so each
        process does it once. An engine that stands by does it in advance: every router asks for the digest,
        and would wait for it after a failover.
        """
        if self.tokenizer_directory is None:
            return ""
        try:
            return _digest(self.tokenizer_directory / "tokenizer.json")
        except OSError:  # which may not last
            return ""


@cache
def _digest(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def resolve_model(config: EngineConfig) -> ModelSource:
    """Find the model of an engine's options; see `resolve`."""
    return resolve(
        config.model,
        config.load_format,
        config.cache_dir,
        revision=config.revision,
        quantization=config.quantization,
    )


def resolve(
    model: str | None,
    load_format: LoadFormat,
    cache_dir: Path | str,
    *,
    revision: str | None = None,
    quantization: Quantization = "auto",
) -> ModelSource:
    """Find `model`: a directory, a GGUF file, a hub id, or None for the bundled model.

    `revision` is a branch, tag or commit of a hub id; None: its main branch. For `quantization` see
    `ModelConfig.quantized`.

    Files that the cache lacks are fetched and converted, except for the weights of a GGUF file.

    Raises:
        ModelFileError: the model or its revision does not exist, a file is missing or corrupt, or does not
            fit `load_format`.
        UnsupportedModelError: the architecture is not supported; the text lists the supported ones.
        ConfigError: the model cannot have this quantization.
        CacheDirectoryError: a file has to be written to `cache_dir`, and `cache_dir` is not writable.
    """
    cache_dir = Path(cache_dir)
    if model is None:
        _check_has_revisions(revision, "the bundled model")
        name, path = bundled.NAME, bundled.ensure_bundled_model(cache_dir)
    else:
        name, path = _locate(model, load_format, revision)
    gguf = _gguf_file(path, load_format)
    if gguf is None and load_format == "gguf":
        raise ModelFileError(
            f"model directory {path} has no *.gguf file; the load format 'gguf' needs one. Use 'auto'"
        )
    if gguf is not None and load_format == "safetensors":
        raise ModelFileError(
            f"model {gguf} is a file; the load format 'safetensors' needs a directory with a config.json. "
            "Use 'auto'"
        )
    directory = path if gguf is None else _converted(gguf, cache_dir)
    hf_config = read_json(directory / "config.json")
    try:
        config = ModelConfig.from_hf(hf_config).quantized(quantization)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise model_files.corrupt(
            directory / "config.json", f"a field has a value of the wrong kind ({error})"
        ) from error
    generation = directory / "generation_config.json"
    return ModelSource(
        name=name,
        format="dummy" if load_format == "dummy" else "safetensors" if gguf is None else "gguf",
        directory=directory,
        gguf=gguf,
        tokenizer_directory=(
            directory if any((directory / file).exists() for file in TOKENIZER_FILES) else None
        ),
        config=config,
        model_type=hf_config.get("model_type"),
        architectures=tuple(hf_config["architectures"]),
        eos_token_ids=eos_token_ids(hf_config, read_json(generation) if generation.exists() else {}),
    )


def resolve_weights(
    model: str,
    load_format: LoadFormat,
    cache_dir: Path | str,
    served: ModelConfig,
    *,
    revision: str | None = None,
) -> ModelSource:
    """As `resolve`, for new weights of a model that is `served`: a directory needs no config.json then.

    Trainers that save each step write the safetensors files alone. Those files must fit the served model.
    `revision` is that of the served repository; a local file or directory of the same name has none.
    """
    model_files.check_path(model)
    path = os.path.expanduser(model)
    is_bare = (
        load_format in ("auto", "safetensors")
        and model_files.may_be_at(path)
        and not os.path.exists(os.path.join(path, "config.json"))
        and any(os.path.exists(os.path.join(path, name)) for name in (model_files.SINGLE, model_files.INDEX))
    )
    if not is_bare:
        return resolve(model, load_format, cache_dir, revision=None if _is_local(model) else revision)
    directory = Path(path).resolve()
    return ModelSource(
        name=directory.name,
        format="safetensors",
        directory=directory,
        gguf=None,
        tokenizer_directory=None,
        config=served,
        model_type=None,
        architectures=(served.architecture,),
        eos_token_ids=(),
    )


def tokenizer_files(tokenizer: str) -> Path:
    """Return the directory of a tokenizer: `tokenizer` itself, or that of a hub id's small files.

    Raises:
        ModelFileError: there is none, or it has no tokenizer.
    """
    path = Path(os.path.expanduser(tokenizer))
    if path.is_dir():
        path = path.resolve()
    elif not path.exists() and hub.is_repository_id(tokenizer):
        path = hub.fetch(tokenizer, weights=False)
    else:
        raise ModelFileError(f"tokenizer={tokenizer!r}: give a directory, or a hub id (owner/name)")
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        raise ModelFileError(f"tokenizer={tokenizer!r}: the directory has none of {names}; give another one")
    return path


def _check_has_revisions(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelFileError(
            f"revision={revision!r}: {what} is on this machine, and only models of the hub have revisions; "
            "leave --revision out"
        )


def _is_local(model: str) -> bool:
    """Whether `model` is a file or directory that may be read.

    Raises:
        ModelFileError: the file system does not tell.
    """
    path = Path(os.path.expanduser(model))
    try:
        # The empty string is no model, although `Path("")` is the current directory.
        return model != "" and model_files.may_be_at(path) and path.exists()
    except OSError as error:
        raise ModelFileError(
            f"cannot open model {model_files.short_path(model)}: {error.strerror}"
        ) from error


def _locate(model: str, load_format: LoadFormat, revision: str | None) -> tuple[str, Path]:
    """Return the short name of `model`, and its directory or GGUF file."""
    model_files.check_path(model)
    path, shown = Path(os.path.expanduser(model)), model_files.short_path(model)
    if _is_local(model):
        _check_has_revisions(revision, f"model {shown}")
        return path.resolve().name.removesuffix(".gguf"), path.resolve()
    is_hub_id = path.suffix != ".gguf" and hub.parse_id(model) is not None
    if is_hub_id and model_files.current.get().hub:
        return model, hub.fetch(model, weights=load_format != "dummy", revision=revision)
    how = "; to fetch it from the hub, start the server with --weights-from-hub" if is_hub_id else ""
    if not model_files.may_be_at(path):  # the same text whether the path exists or not
        raise ModelFileError(f"model {shown} is not within the directories of --weights-root{how}")
    raise ModelFileError(
        f"model {shown} does not exist: give a directory, a GGUF file or a hub id (owner/name, or "
        f"owner/name:QUANTIZATION for a GGUF file){how}"
    )


def _converted(gguf: Path, cache_dir: Path) -> Path:
    """Return the directory with what is converted from a GGUF file, except for its weights.

    Only here the gguf package is loaded: every start of a process with another model does without it.
    """
    from segue.checkpoint.gguf import convert

    return convert.convert(gguf, cache_dir)


def _gguf_file(path: Path, load_format: LoadFormat) -> Path | None:
    """Return the GGUF file at `path`, or the only one in the directory `path`.

    Returns None if the directory has no GGUF file. With a config.json, it counts as a model of safetensors
    files, so its GGUF files are ignored unless `load_format` is "gguf".
    """
    if not path.is_dir():
        from segue.checkpoint.gguf.file import open_gguf

        open_gguf(path).close()  # raises an error for any other kind of file
        return path
    if load_format != "gguf" and (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelFileError(f"model directory {path} has {len(files)} GGUF files; name one of them: {names}")
    return files[0] if files else None


def eos_token_ids(hf_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a generation: those of `generation_config`, else of `hf_config`.

    Raises:
        ModelFileError: the values are not token ids.
    """
    found = generation_config.get("eos_token_id")
    if found is None:
        found = hf_config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ModelFileError(
                f"the model's eos_token_id is {found!r}; it must be a token id or a list of token ids: "
                "correct generation_config.json or config.json"
            )
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a model's JSON file.

    Raises:
        ModelFileError: the file is missing, cannot be read, or does not hold a JSON object.
    """
    try:
        if not path.exists():
            raise ModelFileError(f"model file {path} is missing; a model directory needs it")
        content = json.loads(model_files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"model file {path} is corrupt or cannot be read ({error}). Get it again"
        ) from error
    if not isinstance(content, dict):
        raise model_files.corrupt(path, "it holds no JSON object")
    return content
