"""From token ids to text, a token at a time, by a table of bytes."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Collection

from tokenizers import Tokenizer

from segue.errors import UnsupportedModelError

_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenTable:
    """The bytes of each token.

    ``pieces[id]`` is the token's text, or None where its bytes are not characters by themselves, as when a
    character is spread over several tokens.
    """

    def __init__(self, tokens: list[bytes], special_ids: Collection[int] = ()) -> None:
        self.tokens = tokens
        self.pieces = [_piece(token) for token in tokens]
        self.visible = list(self.pieces)  # the same, with special tokens empty
        self.special_ids = frozenset(special_ids)
        for token in self.special_ids:
            self.visible[token] = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, special_ids: Collection[int], size: int) -> TokenTable:
        """Read it out of a tokenizer; ids up to ``size`` that it does not know are empty.

        Raises:
            UnsupportedModelError: a tokenizer whose tokens are not pieces of text.
        """
        to_bytes = _rule(tokenizer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        tokens = [b""] * max(size, max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            tokens[token] = to_bytes(text)
        return cls(tokens, special_ids)

    def text(self, token: int) -> str:
        """One token by itself, special ones too; bytes that are no character become U+FFFD."""
        return self.tokens[token].decode("utf-8", "replace") if token < len(self.tokens) else ""


class Detokenizer:
    """The text of one request. Never gives half a character: its bytes wait for the rest."""

    __slots__ = ("_pending", "_pieces", "_special", "_tokens")

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True) -> None:
        self._tokens = table.tokens
        self._pieces = table.visible if skip_special_tokens else table.pieces
        self._special = table.special_ids if skip_special_tokens else frozenset[int]()
        self._pending = b""

    def push(self, token: int) -> str:
        """The text that this token completes."""
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
        """What is left when no more tokens come: U+FFFD for a character that was never completed."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


def _piece(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _rule(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How a token's name becomes bytes."""
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse", "ByteFallback", "Replace"}:
        # The latter two are of SentencePiece; some versions of transformers add them to what GGUF files give.
        # They find nothing to do in a vocabulary that writes every byte as a character of its own.
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
    except KeyError:  # an added token, written as itself
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones of Latin-1 are themselves, the others U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
