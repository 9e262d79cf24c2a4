"""Writes an artificial tokenizer for a model with dummy weights, so that a server can decode its tokens.

Every token is visible ASCII, so each sampled token is text at once, and no stream waits for half a character.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@contextmanager
def with_tokenizer(directory: Path) -> Iterator[Path]:
    """Yield `directory` if it has a tokenizer, else a temporary copy of its JSON files with a tokenizer."""
    if (directory / "tokenizer.json").exists():
        yield directory
        return
    with TemporaryDirectory() as parent:
        path = Path(parent) / directory.resolve().name
        path.mkdir()
        for file in directory.glob("*.json"):
            shutil.copy(file, path)
        write_tokenizer(path)
        yield path


def write_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` with the vocabulary size of ``config.json``, and ``tokenizer_config.json``."""
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, "\u0120"]  # the last is a space
    words = (f"\u0120{number}" for number in range(size))
    vocabulary = {text: index for index, text in zip(range(size), (*characters, *words), strict=False)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
