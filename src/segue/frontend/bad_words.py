"""``bad_words``: texts that the output must not have, as the sequences of tokens that write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1 << 14  # of all bad words of a request together

Words = tuple[tuple[int, ...], ...]  # one entry per sequence of tokens


def check_bad_words(words: Sequence[str], fail: Callable[[str, str], None]) -> None:
    """Call ``fail`` with a value and the rule that it breaks."""
    if len(words) > MAX_BAD_WORDS:
        fail(f"{len(words)} strings", f"at most {MAX_BAD_WORDS} are allowed")
    if (count := sum(map(len, words))) > MAX_BAD_WORD_CHARS:
        fail(f"{count} characters", f"at most {MAX_BAD_WORD_CHARS} are allowed")
    if "" in words:
        fail("", "an empty string cannot be a bad word; leave it out")


def token_sequences(words: Sequence[str], encode: Callable[[str], list[int]], vocab_size: int) -> Words:
    """Return the sequences of tokens that write words: each as it begins a text, and as it follows a space.

    ``encode`` tokenizes a text without special tokens. Sequences with ids that the model has no logits for
    cannot be generated, and are left out. Spaces at the beginning of a word do not matter.
    """
    found: dict[tuple[int, ...], None] = {}  # a set in order
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            ids = tuple(encode(text))
            if ids and max(ids) < vocab_size:
                found[ids] = None
    return tuple(found)
