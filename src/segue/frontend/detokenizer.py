"""Tokens as text: a table of each token's bytes, a request's text token by token, and its stop strings.

The table also gives an upper bound of the characters per token, which refuses a long text untokenized.
"""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, models

from segue.errors import UnsupportedModelError

_SPACE = "\u2581"  # how SentencePiece writes a space
# The most characters of a text that a kind of normalizer turns into one. A composed character has at most
# four parts, like U+1F82. Kinds that are not listed may drop any number of characters.
_SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that keep every character.
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Sequence"})

# Texts that tell the parts of a chat's reply apart; some vocabularies have them as special tokens.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")

_CONTINUATION = bytes(range(0x80, 0xC0))  # the bytes of a character after its first


class TokenTable:
    """The bytes of each token of a vocabulary.

    ``pieces[id]`` is the token's text, or None if its bytes alone are not valid UTF-8, because a character is
    spread over several tokens.
    """

    def __init__(self, tokens: list[bytes], special_ids: Collection[int] = ()) -> None:
        """Make a table of ``tokens``, the bytes of each id; the texts of ``special_ids`` can be left out."""
        self.tokens = tokens
        self.pieces = [_piece(token) for token in tokens]
        self.visible = list(self.pieces)  # as `pieces`, but with empty special tokens
        self.special_ids = frozenset(special_ids)
        for token in self.special_ids:
            self.visible[token] = ""
        self.marks = {  # the ids of `MARKS` that are tokens
            text: token for token, text in enumerate(self.pieces) if text is not None and text in MARKS
        }
        self.marked = self.visible  # as `visible`, but with the text of marks that are special tokens
        if hidden := self.special_ids & set(self.marks.values()):
            self.marked = list(self.visible)
            for token in hidden:
                self.marked[token] = self.pieces[token]

    @classmethod
    def of(cls, tokenizer: Tokenizer, special_ids: Collection[int], size: int) -> TokenTable:
        """Make the table of a tokenizer. Ids below ``size`` that the tokenizer does not have are empty.

        Raises:
            UnsupportedModelError: the tokenizer's decoder is neither byte-level nor SentencePiece.
        """
        to_bytes = _token_to_bytes(tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        tokens = [b""] * max(size, max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            tokens[token] = to_bytes(text)
        return cls(tokens, special_ids)

    def text(self, token: int) -> str:
        """Return one token as text, special ones included. Bytes that are not valid UTF-8 become U+FFFD."""
        return self.tokens[token].decode("utf-8", "replace") if token < len(self.tokens) else ""


class Detokenizer:
    """Makes the text of one request. The bytes of an incomplete character wait for the rest of it."""

    __slots__ = ("_pending", "_pieces", "_special", "_tokens")

    def __init__(
        self, table: TokenTable, *, skip_special_tokens: bool = True, keeps_marks: bool = False
    ) -> None:
        """Begin a text; with ``keeps_marks`` special tokens that are `MARKS` are not skipped."""
        self._tokens = table.tokens
        skipping = table.marked if keeps_marks else table.visible
        self._pieces = skipping if skip_special_tokens else table.pieces
        self._special = table.special_ids if skip_special_tokens else frozenset[int]()
        if keeps_marks:
            self._special = self._special.difference(table.marks.values())
        self._pending = b""

    def push(self, token: int) -> str:
        """Take a token, and return the text that it completes."""
        if not self._pending:
            piece = self._pieces[token]
            if piece is not None:
                return piece
        if token in self._special:
            return ""
        data = self._pending + self._tokens[token]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """Return the rest of the text after the last token: U+FFFD for an incomplete character."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


def _piece(token: bytes) -> str | None:
    """Return the bytes as text, or None if they are not valid UTF-8."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _token_to_bytes(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return the function that turns a token of the vocabulary into its bytes."""
    decoder = _state(tokenizer.decoder)
    parts = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse", "ByteFallback", "Replace"}:
        # ByteFallback and Replace belong to SentencePiece. Some versions of transformers add them to the
        # decoder of a GGUF file. They have no effect if the vocabulary writes every byte as one character.
        alphabet = byte_alphabet()
        return lambda text: _from_alphabet(text, alphabet)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _from_sentencepiece
    raise UnsupportedModelError(
        f"tokenizer decoder {sorted(kinds) or None} is not supported; "
        "use a model with a byte-level or SentencePiece tokenizer"
    )


def _from_alphabet(text: str, alphabet: dict[str, int]) -> bytes:
    """Return the bytes of a byte-level token, in which each character stands for one byte."""
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:  # an added token is written as plain text
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    """Return the bytes of a SentencePiece token; one like ``<0x0A>`` is a single byte."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones of Latin-1 stay, the others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


# --- stop strings ---


class _PrefixMatch:
    """Tracks the longest prefix of a stop string that the text ends with. ``size`` is its length.

    The time is proportional to the text, however often a long prefix fails to match (Knuth-Morris-Pratt). For
    that the class keeps borders: a border of a prefix is a shorter prefix with which it also ends. They are
    computed only for prefixes that have occurred, because a stop string may be long.
    """

    __slots__ = ("_borders", "_stop", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # for each prefix of the stop string: the length of its longest border
        self.size = 0

    def push(self, text: str) -> None:
        """Take more text. It must not complete the stop string."""
        stop, size, at = self._stop, self.size, 0
        while at < len(text):
            # Where no prefix matches, go on at the next character that may begin one.
            if size == 0 and (at := text.find(stop[0], at)) < 0:
                break
            if text[at] == stop[size]:
                size, at = size + 1, at + 1
                if size > len(self._borders):
                    self._add_border()
            else:
                size = self._borders[size - 1]  # the next shorter prefix that still matches
        self.size = size

    def _add_border(self) -> None:
        """Compute the longest border of the next longer prefix, from those of the shorter ones."""
        stop, borders = self._stop, self._borders
        size, last = borders[-1], stop[len(borders)]
        while size and stop[size] != last:
            size = borders[size - 1]
        borders.append(size + (stop[size] == last))


class StopMatcher:
    """Finds the stop string that ends first, and holds back text that may be the beginning of a stop string.

    The result is as if text came character by character, so it does not depend on the cuts between tokens.
    """

    __slots__ = ("_held", "_keep", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """Look for the strings ``stops``, none of them empty; with ``keep`` the text keeps the one found."""
        self._stops = stops
        self._prefixes = [_PrefixMatch(stop) for stop in stops]
        self._keep = keep  # whether the stop string stays in the text
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text. Return the text that may be shown, and the stop string that is complete, if any."""
        buffer = self._held + text
        found: str | None = None
        start, end = 0, len(buffer) + 1
        for stop in self._stops:
            at = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            # The first end counts and, among equal ends, the longest stop string.
            if at >= 0 and (at + len(stop), at) < (end, start):
                found, start, end = stop, at, at + len(stop)
        if found is not None:
            self._held = ""
            return buffer[: end if self._keep else start], found
        for prefix in self._prefixes:
            prefix.push(text)
        first = len(buffer) - max((prefix.size for prefix in self._prefixes), default=0)
        self._held = buffer[first:]
        return buffer[:first], None

    def flush(self) -> str:
        """Return the text that was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held


# --- the most characters that one token can stand for ---


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
    # The characters that begin in the token: bytes that continue a character do not count.
    num_chars = (len(token.translate(None, _CONTINUATION)) for token in tokens)
    return shrinks * max(1, *num_chars)


def _state(part: Any) -> Mapping[str, Any]:
    """Return a part's settings as the tokenizer.json has them; empty if the tokenizer lacks the part."""
    state: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """Return the most characters that a normalizer turns into one; None: there is no limit.

    In a sequence the limits multiply.
    """
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
    """Whether a pre-tokenizer keeps every character; kinds that are not known count as if they did not."""
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
