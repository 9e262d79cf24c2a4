"""A GGUF file's config and tokenizer as Hugging Face files, made once and kept in the user's cache."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segue.errors import ModelFileError
from segue.weights import cache, gguf_config
from segue.weights.gguf_file import GGUFFile

CONVERTED_KEY = "converted_from_gguf"  # in tokenizer_config.json
FORMAT = "1"  # to be raised when what is written here, or the weights beside it, changes


def convert(path: Path, cache_dir: Path) -> Path:
    """The directory with the configs and the tokenizer of the GGUF file at `path`.

    It is `<cache_dir>/converted/<SHA-256 of the file>/<FORMAT>`; `gguf_weights.convert` adds the weights.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt, or its tokenizer is of an unknown kind.
        UnsupportedModelError: its architecture is not supported; the message lists those that are.
        CacheDirectoryError: the cache cannot be written.
    """
    directory = cache_dir / "converted" / cache.sha256_of(path, cache_dir) / FORMAT
    if not directory.is_dir():
        file = GGUFFile.read(path)
        config = gguf_config.config(file)
        cache.publish_directory(directory, lambda temporary: _fill(temporary, file, config))
    return directory


def _fill(directory: Path, file: GGUFFile, config: Mapping[str, Any]) -> None:
    for name, content in (("config", config), ("generation_config", gguf_config.generation_config(file))):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    if file.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
        _convert_tokenizer(directory, file)


def _convert_tokenizer(directory: Path, file: GGUFFile) -> None:
    with _quiet("transformers"):
        from transformers import PreTrainedTokenizerFast

        try:
            # AutoTokenizer comes to the same, but reads the metadata several times, seconds each.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=file.path.name)
        except Exception as error:  # whatever a Rust or Python parser makes of a broken vocabulary
            raise ModelFileError(
                f"model file {file.path}: its tokenizer cannot be converted ({error})"
            ) from error
        tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    # tokenizer.json has it all; a class of the model's own would build it anew, in its own way.
    content |= {"tokenizer_class": "PreTrainedTokenizerFast", CONVERTED_KEY: True}
    settings.write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
