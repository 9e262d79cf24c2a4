"""Turns token ids into text, one token at a time, with a table of each token's bytes."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Collection

from tokenizers import Tokenizer

from segue.errors import UnsupportedModelError

_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenTable:
    """The bytes of each token of a vocabulary.

    ``pieces[id]`` is the token's text, or None if its bytes alone are not valid UTF-8, because a character is
    spread over several tokens.
    """

    def __init__(self, tokens: list[bytes], special_ids: Collection[int] = ()) -> None:
        self.tokens = tokens
        self.pieces = [_piece(token) for token in tokens]
        self.visible = list(self.pieces)  # as `pieces`, but with empty special tokens
        self.special_ids = frozenset(special_ids)
        for token in self.special_ids:
            self.visible[token] = ""

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

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True) -> None:
        self._tokens = table.tokens
        self._pieces = table.visible if skip_special_tokens else table.pieces
        self._special = table.special_ids if skip_special_tokens else frozenset[int]()
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
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _token_to_bytes(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return the function that turns a token of the vocabulary into its bytes."""
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
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
    try:
        return bytes([alphabet[char] for char in text])
    except KeyError:  # an added token is written as plain text
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones of Latin-1 stay, the others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
