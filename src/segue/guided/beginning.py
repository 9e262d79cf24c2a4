"""How much the beginning of a grammar costs: its compilation and its first mask, before an engine gets it.

Rank 0 of an engine waits for both, and all of its requests with it. They take about as long with a vocabulary
of single bytes, which is there at once.
"""

from __future__ import annotations

import time
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The work that the beginning of a grammar may need, so that none keeps the steps of all requests waiting.
# It is three times what an enumeration of 7000 strings needs, or 300 properties with dates.
MAX_FIRST_WORK = 300_000
LIMITS = LLParserLimits(initial_lexer_fuel=MAX_FIRST_WORK)
# Seconds of CPU time, of a thread. 300 properties with dates take 0.2 s to compile; the first mask of what is
# no trap takes a few milliseconds.
MAX_COMPILE_S, MAX_MASK_S = 0.5, 0.1
# How many times as long a grammar may take that another engine accepts or refuses: it must not be refused
# because this machine is slower. Its work is bounded as that of the others.
ACCEPTED_PATIENCE = 10
END = 256  # the token that ends the output


class ByteVocabulary:
    """A vocabulary of single bytes, as llguidance asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what a `TokenizerWrapper` has


def what_is_wrong(grammar: str, *, is_accepted: bool = False) -> str:
    """Compile a grammar, given in llguidance's form, and compute its first mask; other threads go on.

    With ``is_accepted`` another engine decides whether it is too slow, and it may take longer here. Returns
    why the grammar cannot be used; "": it can.
    """
    patience = ACCEPTED_PATIENCE if is_accepted else 1
    most_compile_s, most_mask_s = MAX_COMPILE_S * patience, MAX_MASK_S * patience
    began = time.thread_time()
    matcher = LLMatcher(_tokenizer(), grammar, log_level=0, limits=LIMITS)
    compiled = time.thread_time()
    if not matcher.is_error():
        matcher.compute_bitmask()
    seconds = time.thread_time() - compiled
    if matcher.is_error():
        return matcher.get_error().split("<state>")[0]
    if (compile_s := compiled - began) > most_compile_s:
        return f"it takes {compile_s:.1f} s to compile, and may take {most_compile_s:g} s; give a simpler one"
    if seconds > most_mask_s:
        most = f"and may take {most_mask_s:g} s"
        return f"its first tokens take {seconds:.2f} s to find, {most}; give a simpler one"
    return ""
