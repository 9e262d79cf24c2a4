"""A GGUF file's config and tokenizer as Hugging Face files, made once and kept in the user's cache."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segue.weights import cache, gguf_config, gguf_tokenizer
from segue.weights.gguf_file import GGUFFile

FORMAT = "2"  # to be raised when what is written here, or the weights beside it, changes


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
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    gguf_tokenizer.convert(file, directory)
