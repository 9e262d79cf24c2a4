"""A GGUF file's config and tokenizer as Hugging Face files, made once and kept in the user's cache."""

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

FORMAT = "3"  # to be raised when what is written here, or the weights beside it, changes
RECORD = "checksums.json"


def convert(path: Path, cache_dir: Path) -> Path:
    """The directory with the configs and the tokenizer of the GGUF file at `path`.

    It is `<cache_dir>/converted/<SHA-256 of the file>/<FORMAT>`; `gguf_weights.convert` adds the weights.
    Files there that are damaged are made again.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt, or its tokenizer is of an unknown kind.
        UnsupportedModelError: its architecture is not supported; the message lists those that are.
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
            logger.warning("the cache directory %s is damaged: %s; making it again", directory, damage)
            _replace_files(directory, fill)
        elif damage is not None:
            cache.publish_directory(directory, fill)
    return directory


def _replace_files(directory: Path, fill: Callable[[Path], None]) -> None:
    """Put what `fill` makes into `directory`, where there may be weights besides."""
    with tempfile.TemporaryDirectory(prefix="segue-") as temporary:
        fill(Path(temporary))
        for made in Path(temporary).iterdir():
            cache.publish_file(directory / made.name, partial(shutil.copyfile, made))


def _fill(directory: Path, file: GGUFFile, config: Mapping[str, Any]) -> None:
    for name, content in (("config", config), ("generation_config", gguf_config.generation_config(file))):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.convert(file, directory)
    file_checksums.write(directory / RECORD, sorted(made.name for made in directory.iterdir()))
