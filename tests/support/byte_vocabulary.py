"""A vocabulary of single bytes, as llguidance asks for it."""

from __future__ import annotations

END = 256


class ByteVocabulary:
    """One token per byte, and one that ends the output."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*(bytes([index]) for index in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
