"""An upper bound of the characters per token, to refuse a text that is too long without tokenizing it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer, models

from segue.frontend.detokenizer import byte_alphabet

# The most characters of a text that a kind of normalizer turns into one. A composed character has at most
# four parts, like U+1F82. Kinds that are not listed may drop any number of characters.
_SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that keep every character.
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Sequence"})

_CONTINUATION = bytes(range(0x80, 0xC0))  # the bytes of a character after its first


def max_chars_per_token(tokenizer: Tokenizer, tokens: Iterable[bytes]) -> int | None:
    """Return the most characters of a text that can become one of ``tokens``, the vocabulary in bytes.

    None: there is no bound, because characters may be dropped or merged in any number: by a normalizer that
    strips, by a special token that absorbs the spaces beside it, or because the vocabulary lacks them.
    """
    shrinks = _shrinks(_state(tokenizer.normalizer))
    if shrinks is None or not _keeps_all(_state(tokenizer.pre_tokenizer)) or not _knows_all(tokenizer):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    num_chars = (len(token.translate(None, _CONTINUATION)) for token in tokens)  # that begin in the token
    return shrinks * max(1, *num_chars)


def _state(part: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """Return the most characters that become one; None: there is no limit."""
    kind = normalizer.get("type")
    if kind is None:
        return 1
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(pattern) <= len(normalizer["content"]) else None
    if kind != "Sequence":
        return _SHRINKS.get(kind)
    product = 1
    for part in map(_shrinks, normalizer["normalizers"]):
        if part is None:
            return None
        product *= part
    return product


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return kind is None or (kind in _KEEPING and pre_tokenizer.get("behavior") != "Removed")


def _knows_all(tokenizer: Tokenizer) -> bool:
    """Whether every byte is a token, so that no run of characters becomes a single unknown token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    state = json.dumps([_state(tokenizer.pre_tokenizer), _state(tokenizer.normalizer)])
    return '"ByteLevel"' in state and all(char in vocabulary for char in byte_alphabet())
