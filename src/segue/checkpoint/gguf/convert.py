"""Converts a GGUF file's config and tokenizer to Hugging Face files, once, in the user's cache."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from segue.checkpoint import cache, file_checksums
from segue.checkpoint.gguf import config as gguf_config
from segue.checkpoint.gguf import tokenizer
from segue.checkpoint.gguf.file import GGUFFile
from segue.logs import logger

FORMAT = "3"  # raise it when the content of these files, or of the weights beside them, changes
RECORD = "checksums.json"


def convert(path: Path, cache_dir: Path) -> Path:
    """Return the directory with the configs and the tokenizer of the GGUF file at `path`.

    The directory is `<cache_dir>/converted/<SHA-256 of the file>/<FORMAT>`; `gguf.weights.convert` adds the
    weights. Damaged files in it are written again.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt, or its tokenizer is of an unknown kind.
        UnsupportedModelError: the architecture is not supported; the text lists the supported ones.
        CacheDirectoryError: the cache cannot be written.
    """
    directory = cache_dir / "converted" / cache.sha256_of(path, cache_dir) / FORMAT
    if file_checksums.find_damage(directory / RECORD) is None:
        return directory
    file = GGUFFile.read(path)
    fill = partial(_fill, file=file, config=gguf_config.config(file))
    with cache.exclusive(directory):
        damage = file_checksums.find_damage(directory / RECORD)  # another process may have been faster
        if damage is not None and directory.is_dir():
            logger.warning("the cache directory %s is damaged: %s; converting again", directory, damage)
            _replace_files(directory, fill)
        elif damage is not None:
            cache.publish_directory(directory, fill)
    return directory


def _replace_files(directory: Path, fill: Callable[[Path], None]) -> None:
    """Replace the files that `fill` makes in `directory`, and keep the others, such as weights."""
    with tempfile.TemporaryDirectory(prefix="segue-") as temporary:
        fill(Path(temporary))
        for made in Path(temporary).iterdir():
            cache.publish_file(directory / made.name, partial(shutil.copyfile, made))


def _fill(directory: Path, file: GGUFFile, config: Mapping[str, Any]) -> None:
    for name, content in (("config", config), ("generation_config", gguf_config.generation_config(file))):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.convert(file, directory)
    file_checksums.write(directory / RECORD, sorted(made.name for made in directory.iterdir()))
