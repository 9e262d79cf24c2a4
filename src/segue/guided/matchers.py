"""Where each guided request stands in its grammar, and the tokens that it may draw next.

:class:`Matchers` lives beside the sampler of rank 0. What takes time happens in one thread of its own, in the
order in which it was asked for: a mask is computed from a step's token while the next step's model runs.

The thread holds the GIL while it consumes tokens, and not while it computes masks.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from segue.guided.beginning import LIMITS
from segue.guided.grammars import GrammarError, reason_of, to_llguidance
from segue.logs import logger
from segue.messages.guided import GrammarSpec, GuidedVocabulary
from segue.messages.requests import SamplingParams

MAX_COMPILED = 128  # grammars that are kept compiled: those that were used last
# The phases of a step with guided rows: until its tokens are on the host; consuming them; computing the next
# masks, which with the phase before should take less than a forward pass; what then is left to wait for; and
# from there until sampling has been launched.
PHASES = ("tokens", "consume", "masks", "wait", "launch")
MAX_TIMED = 1024  # steps
Mask = NDArray[np.int32]  # one bit per token, the lowest bit of the first word is token 0; set: allowed


@dataclass(slots=True, eq=False)
class Guide:
    """One request's place in its grammar. The thread writes it; others read it once ``ready`` is done."""

    slot: int
    mask: Mask  # `[ceil(V / 32)]`, of the next token: the slot's row
    late_eos: bool  # as in `SamplingParams`
    ready: Future[None]
    matcher: LLMatcher | None = None  # None: the grammar could not be followed; see `failure`
    failure: str = ""  # why; ""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which tokens the guided rows of a step may draw."""

    rows: NDArray[np.int64]  # `[G]`, the guided ones of the step's sampling rows
    masks: Mask  # `[G, ceil(V / 32)]`
    failures: dict[int, str]  # row -> why its grammar cannot be followed; its mask allows anything


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


class Matchers:
    """The guides of the request slots. A slot without a grammar has none, and costs nothing."""

    def __init__(self, masks: Mask, num_threads: int = 1) -> None:
        """Take the masks to write, `[slots, ceil(V / 32)]`, and how many threads compute those of a step.

        A slot's row is written until `wait` has returned for it, and then not before `take`.
        """
        self._masks = masks
        self._num_threads = num_threads
        self._times = {name: deque[float](maxlen=MAX_TIMED) for name in PHASES}
        self._guides: dict[int, Guide] = {}
        self._thread: ThreadPoolExecutor | None = None  # None: nothing was ever guided
        self._executor: LLExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._waited_at = 0.0  # when `wait` returned
        self._eos_mask = np.zeros(masks.shape[1], dtype=np.int32)
        self._eos_words = np.empty(0, dtype=np.int64)  # those where the mask of the EOS tokens has a bit
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        """Take the vocabulary, which must come before the first grammar."""
        self._submit(lambda: self._prepare(vocabulary))

    def put(self, slot: int, params: SamplingParams, outputs: Sequence[int]) -> None:
        """Let a new request have a slot; ``outputs`` are the output tokens that it has already."""
        if params.grammar is None:
            self._guides.pop(slot, None)
            return
        spec = params.grammar
        guide = self._guides[slot] = Guide(slot, self._masks[slot], params.late_eos, ready=Future())
        guide.ready = self._submit(lambda: self._begin(guide, spec, outputs))

    def forget(self, slots: Sequence[int]) -> None:
        """Free what is kept of slots whose requests have ended; no step that is still to run may use them."""
        guides = [guide for slot in slots if (guide := self._guides.pop(slot, None)) is not None]
        if guides:
            self._submit(lambda: _free(guides))

    def wait(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, str]] | None:
        """Wait until the masks of these slots are known.

        Returns the rows that are guided, and of them those whose grammars cannot be followed, with the
        reasons; None: none is guided.
        """
        guides = self._guided(slots)
        if not guides:
            return None
        began = time.perf_counter()
        for ready in {guide.ready for _, guide in guides}:
            ready.result()
        self._waited_at = time.perf_counter()
        self._times["wait"].append(self._waited_at - began)
        failures = {row: guide.failure for row, guide in guides if guide.failure}
        return np.array([row for row, _ in guides], dtype=np.int64), failures

    def allowed(self, slots: NDArray[np.int64]) -> Allowed | None:
        """Return what the rows with these slots may draw, once that is known; None: none is guided."""
        if (found := self.wait(slots)) is None:
            return None
        rows, failures = found
        return Allowed(rows=rows, masks=self._masks[slots[rows]], failures=failures)

    def take(self, slots: NDArray[np.int64], read: Callable[[], Sequence[int]]) -> Future[list[int]] | None:
        """Go on from the tokens that a step has drawn for these slots, one each.

        ``read`` returns them, and may wait for them. The thread calls it, and only if a slot is guided.

        Returns the future of the rows whose grammars are complete, so that only EOS may follow; it is done
        before the next masks are. None: no row is guided.
        """
        guides = self._guided(slots)
        if not guides:
            return None
        self._times["launch"].append(time.perf_counter() - self._waited_at)
        complete: Future[list[int]] = Future()
        ready = self._submit(lambda: self._advance(guides, read, complete))
        for _, guide in guides:
            guide.ready = ready
        return complete

    def close(self) -> None:
        """End the thread; nothing may be asked for afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def median_ms(self) -> dict[str, float]:
        """Return the median milliseconds of each phase of the last guided steps."""
        return {name: round(1e3 * statistics.median(each), 3) for name, each in self._times.items() if each}

    def _guided(self, slots: NDArray[np.int64]) -> list[tuple[int, Guide]]:
        """Return the rows of these slots that are guided."""
        if not self._guides:
            return []
        return [(row, guide) for row, slot in enumerate(slots.tolist()) if (guide := self._guides.get(slot))]

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segue-guided")
        return self._thread.submit(work)

    # --- in the thread ---

    def _prepare(self, vocabulary: GuidedVocabulary) -> None:
        """Build what all grammars share. llguidance keeps the GIL, so the process does nothing else."""
        started = time.monotonic()
        try:
            self._tokenizer = make_tokenizer(vocabulary)
        except Exception:  # guided requests will fail, and no others
            logger.exception("the vocabulary could not be prepared for guided output")
            return
        self._executor = LLExecutor(self._num_threads)
        for token in vocabulary.eos_ids:
            self._eos_mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
        self._eos_words = self._eos_mask.nonzero()[0]
        logger.info("guided output: the vocabulary took %.2f s", time.monotonic() - started)

    def _begin(self, guide: Guide, spec: GrammarSpec, outputs: Sequence[int]) -> None:
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
        self._fill([guide])

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        """Return a matcher at the start of a grammar, which must be copied."""
        matcher = self._compiled.pop(spec, None)
        if matcher is None:
            if self._tokenizer is None:  # its preparation has failed, as the log says
                raise GrammarError("the vocabulary of this model cannot be used for it")
            matcher = LLMatcher(self._tokenizer, to_llguidance(spec), log_level=0, limits=LIMITS)
            if len(self._compiled) == MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[spec] = matcher
        return matcher

    def _advance(
        self,
        guides: Sequence[tuple[int, Guide]],
        read: Callable[[], Sequence[int]],
        complete: Future[list[int]],
    ) -> None:
        """Take a token per guide, by row, and compute the masks of the next tokens.

        A request whose grammar is complete has ended; its slot may be part of a step that was planned before.
        """
        going_on, ended, stamps = list[Guide](), list[int](), [time.perf_counter()]
        try:
            tokens = read()
            stamps.append(time.perf_counter())
            for row, guide in guides:
                matcher = guide.matcher
                if matcher is None or tokens[row] < 0 or matcher.is_stopped():
                    continue
                matcher.consume_token(tokens[row])
                going_on.append(guide)
                if matcher.is_stopped() and not matcher.is_error():
                    ended.append(row)
        except BaseException as error:
            complete.set_exception(error)
            raise
        complete.set_result(ended)
        stamps.append(time.perf_counter())
        self._fill(going_on)
        stamps.append(time.perf_counter())
        for name, start, end in zip(PHASES, stamps, stamps[1:], strict=False):
            self._times[name].append(end - start)

    def _fill(self, guides: Sequence[Guide]) -> None:
        """Compute the masks of the next tokens."""
        if not guides:
            return
        assert self._executor is not None
        masks, eos = self._masks, self._eos_words
        matchers = [(guide.matcher, guide.slot) for guide in guides if guide.matcher is not None]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
        for guide in guides:
            assert guide.matcher is not None
            mask = guide.mask
            if guide.matcher.is_error():
                guide.failure = reason_of(guide.matcher.get_error().split("<state>")[0])
                guide.matcher = None
                mask[:] = -1
            elif guide.late_eos and (mask[eos] & self._eos_mask[eos]).any():
                others = mask & ~self._eos_mask
                if others.any():
                    mask[:] = others


def _free(guides: Sequence[Guide]) -> None:
    for guide in guides:
        guide.matcher = None
