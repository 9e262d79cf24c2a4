"""Checks the grammars of arriving requests, so that nothing is queued that cannot be guided."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from segue.errors import InvalidRequestError
from segue.frontend.sampling_options import RequestLimits, SamplingOptions
from segue.frontend.thread_pool import ThreadPool
from segue.guided import grammars
from segue.messages.guided import GrammarSpec

MAX_CHECKED = 256  # grammars whose reasons are remembered


class _Check(NamedTuple):
    """What is checked, and whether it may take longer."""

    spec: GrammarSpec
    is_accepted: bool


class GrammarChecks:
    """Checks grammars, each once: the last ones are remembered, with what is wrong with them."""

    def __init__(self, limits: RequestLimits, thread_pool: ThreadPool, *, has_tokenizer: bool) -> None:
        self._limits = limits
        self._thread_pool = thread_pool
        self._has_tokenizer = has_tokenizer
        self._known: OrderedDict[_Check, str] = OrderedDict()  # the reason; "": it is right
        self._checking: dict[_Check, asyncio.Future[str]] = {}

    async def check(self, all_options: Iterable[SamplingOptions], *, is_accepted: bool = False) -> None:
        """Check the grammars of a call's options in a thread.

        With ``is_accepted`` another engine decides what is too slow, so a grammar may take longer here.

        Raises:
            InvalidRequestError: the first that is wrong or not supported, or the model cannot be guided.
        """
        for options in all_options:
            if (spec := options.grammar) is None:
                continue
            name = options.names.get("grammar", "grammar")
            if not self._has_tokenizer or not self._limits.eos_ids:
                missing = "EOS token" if self._has_tokenizer else "tokenizer"
                text = f"{name}: this model has no {missing}, so its output cannot be guided; leave it out"
                raise InvalidRequestError(text, param=name)
            if reason := await self._reason(_Check(spec, is_accepted)):
                kind = spec.kind.replace("_", " ")
                raise InvalidRequestError(f"{name}: the {kind} cannot be used: {reason}", param=name)

    async def _reason(self, check: _Check) -> str:
        """Return why a grammar cannot be used; "": it can."""
        reason = self._known.pop(check, None)
        if reason is None:
            if (task := self._checking.get(check)) is None:  # even a short one may take long
                task = asyncio.ensure_future(self._thread_pool.run(partial(_reason, check)))
                self._checking[check] = task
                task.add_done_callback(lambda _: self._checking.pop(check))
            reason = await asyncio.shield(task)  # others may wait for it too
            if len(self._known) >= MAX_CHECKED and check not in self._known:
                self._known.popitem(last=False)
        if len(check.spec.text) <= grammars.MAX_GRAMMAR_BYTES:
            self._known[check] = reason
        return reason


def _reason(check: _Check) -> str:
    try:
        grammars.check(check.spec, is_accepted=check.is_accepted)
    except grammars.GrammarError as error:
        return str(error)
    return ""
