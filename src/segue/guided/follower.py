"""Follows requests through their grammars: consumes their tokens, and computes the masks of the next ones.

A :class:`Follower` belongs to one thread, or to one process of several; see `matchers` and `processes`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from segue.guided.beginning import LIMITS
from segue.guided.grammars import GrammarError, reason_of, to_llguidance
from segue.logs import logger
from segue.messages.guided import GrammarSpec, GuidedVocabulary

MAX_COMPILED = 128  # grammars that are kept compiled: those that were used last
NO_VOCABULARY = "the vocabulary of this model cannot be used for it"
Mask = NDArray[np.int32]  # one bit per token, the lowest bit of the first word is token 0; set: allowed


@dataclass(slots=True, eq=False)
class Guide:
    """One request's place in its grammar. Its follower writes it; others read it once ``ready`` is done."""

    slot: int
    mask: Mask  # `[ceil(V / 32)]`, of the next token: the slot's row
    late_eos: bool  # as in `SamplingParams`
    ready: Future[None] | None = None  # None: nobody waits for it by a future
    matcher: LLMatcher | None = None  # None: the grammar could not be followed; see `failure`
    failure: str = ""  # why; ""


class _Tokens:
    """The vocabulary, as llguidance asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GuidedVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize what a grammar leaves no choice about: each time the longest token that fits.

        Real tokenizers merge otherwise now and then, but then the text is the same.
        """
        assert self.tokenizer is not None
        return self.tokenizer.greedy_tokenize(text if isinstance(text, str) else text.decode())


def make_tokenizer(vocabulary: GuidedVocabulary) -> LLTokenizer:
    """Return the vocabulary with what llguidance derives from it; it takes part of a second."""
    tokens = _Tokens(vocabulary)
    tokens.tokenizer = LLTokenizer(
        tokens,  # type: ignore[arg-type] # it has what a `TokenizerWrapper` has
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.eos_ids,
    )
    return tokens.tokenizer


class Follower:
    """Follows the guides that it is given."""

    def __init__(self, masks: Mask, executor: LLExecutor | None = None) -> None:
        """Take the masks to write, `[slots, ceil(V / 32)]`.

        With an ``executor`` Python's lock is let go once per step, and its threads compute; without one the
        calling thread does, which takes the lock again for each row, but needs no other thread to wake up.
        """
        self._masks = masks
        self._executor = executor
        self._tokenizer: LLTokenizer | None = None
        self._eos_mask = np.zeros(masks.shape[1], dtype=np.int32)
        self._eos_words = np.empty(0, dtype=np.int64)  # those where the mask of the EOS tokens has a bit
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def prepare(self, vocabulary: GuidedVocabulary) -> None:
        """Build what all grammars share. llguidance keeps the GIL, so the process does nothing else."""
        started = time.monotonic()
        try:
            self._tokenizer = make_tokenizer(vocabulary)
        except Exception:  # guided requests will fail, and no others
            logger.exception("the vocabulary could not be prepared for guided output")
            return
        for token in vocabulary.eos_ids:
            self._eos_mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
        self._eos_words = self._eos_mask.nonzero()[0]
        logger.info("guided output: the vocabulary took %.2f s", time.monotonic() - started)

    def begin(self, guide: Guide, spec: GrammarSpec, outputs: Sequence[int]) -> None:
        """Put a guide at the start of its grammar, and behind the outputs."""
        try:
            guide.matcher = matcher = self._compile(spec).deep_copy()
        except Exception as error:  # only this request fails, although no frontend should have sent it
            if isinstance(error, GrammarError):
                guide.failure = str(error)
            else:
                logger.exception("a grammar of kind %s could not be compiled", spec.kind)
                guide.failure = reason_of(str(error) or type(error).__name__)
            guide.mask[:] = -1
            return
        matcher.consume_tokens(list(outputs))
        self.fill([guide])

    def consume(
        self, guides: Sequence[tuple[int, Guide]], tokens: Sequence[int]
    ) -> tuple[list[Guide], list[int]]:
        """Take a token per guide, by row; negative: none was drawn.

        Returns the guides whose masks have to be computed next, and the rows whose grammars are complete, so
        that only EOS may follow. A request whose grammar is complete has ended; its slot may be part of a
        step that was planned before.
        """
        going_on, ended = list[Guide](), list[int]()
        for row, guide in guides:
            matcher = guide.matcher
            if matcher is None or tokens[row] < 0 or matcher.is_stopped():
                continue
            matcher.consume_token(tokens[row])
            going_on.append(guide)
            if matcher.is_stopped() and not matcher.is_error():
                ended.append(row)
        return going_on, ended

    def fill(self, guides: Sequence[Guide]) -> None:
        """Compute the masks of the next tokens."""
        masks, eos = self._masks, self._eos_words
        start, stride = masks.ctypes.data, masks.strides[0]
        matchers = [(guide.matcher, guide.slot) for guide in guides if guide.matcher is not None]
        if self._executor is None:
            for matcher, slot in matchers:
                matcher.unsafe_compute_mask_ptr(start + slot * stride, stride)
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, start, stride, len(masks))
        for guide in guides:
            assert guide.matcher is not None
            if guide.matcher.is_error():
                guide.failure = reason_of(guide.matcher.get_error().split("<state>")[0])
                guide.matcher = None
                guide.mask[:] = -1
            elif guide.late_eos and (guide.mask[eos] & self._eos_mask[eos]).any():
                others = guide.mask & ~self._eos_mask
                if others.any():
                    guide.mask[:] = others

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        """Return a matcher at the start of a grammar, which must be copied."""
        matcher = self._compiled.pop(spec, None)
        if matcher is None:
            if self._tokenizer is None:  # its preparation has failed, as the log says
                raise GrammarError(NO_VOCABULARY)
            matcher = LLMatcher(self._tokenizer, to_llguidance(spec), log_level=0, limits=LIMITS)
            if len(self._compiled) == MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[spec] = matcher
        return matcher
