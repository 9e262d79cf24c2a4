"""Converts a GGUF file's config and tokenizer to Hugging Face files, once, in the user's cache."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from segue.checkpoint import cache
from segue.checkpoint.gguf import config as gguf_config
from segue.checkpoint.gguf import tokenizer
from segue.checkpoint.gguf.file import GGUFFile

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
    if cache.find_damage(directory / RECORD) is None:
        return directory
    file = GGUFFile.read(path)  # before the cache is written to, since the file may be unsupported
    fill = partial(_fill, file=file, config=gguf_config.config(file))
    cache.make_unless_intact(directory, directory / RECORD, partial(_write, directory, fill), path)
    return directory


def _write(directory: Path, fill: Callable[[Path], None]) -> None:
    """Publish the files that `fill` makes. Other files of the directory stay, such as weights."""
    if not directory.is_dir():
        cache.publish_directory(directory, fill)
        return
    with tempfile.TemporaryDirectory(prefix="segue-") as temporary:
        fill(Path(temporary))
        for made in Path(temporary).iterdir():
            cache.publish_file(directory / made.name, partial(shutil.copyfile, made))


def _fill(directory: Path, file: GGUFFile, config: Mapping[str, Any]) -> None:
    for name, content in (("config", config), ("generation_config", gguf_config.generation_config(file))):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.convert(file, directory)
    cache.write_checksums(directory / RECORD, sorted(made.name for made in directory.iterdir()))
