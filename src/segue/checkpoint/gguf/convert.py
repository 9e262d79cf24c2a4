"""Converts a GGUF file's config and tokenizer to Hugging Face files, once, in the user's cache."""

import json
from pathlib import Path

from segue.checkpoint import cache
from segue.checkpoint.gguf import config as gguf_config
from segue.checkpoint.gguf import tokenizer
from segue.checkpoint.gguf.file import GGUFFile
from segue.checkpoint.model_files import corrupt

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
    if cache.find_damage(directory / RECORD) is None:  # the usual case: the header need not be read
        return directory
    file = GGUFFile.read(path)  # before the cache is written to, since the file may be unsupported
    try:
        config, generation_config = gguf_config.config(file), gguf_config.generation_config(file)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise corrupt(path, f"its metadata has a value of the wrong kind ({error})") from error

    def fill(made: Path) -> None:
        """Write the two configs and the tokenizer into the temporary directory `made`."""
        for name, content in (("config", config), ("generation_config", generation_config)):
            (made / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        tokenizer.convert(file, made)

    cache.make_unless_intact(directory / "config.json", directory / RECORD, fill, path)
    return directory
