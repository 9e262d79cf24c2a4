"""Tests of the checks of arriving requests' grammars."""

from __future__ import annotations

import asyncio
import threading

import pytest

from segue.errors import InvalidRequestError
from segue.frontend import grammars
from segue.frontend.grammars import GrammarChecks
from segue.frontend.sampling_options import RequestLimits, SamplingOptions
from segue.frontend.thread_pool import ThreadPool
from segue.messages.guided import GrammarSpec


def test_requests_that_come_at_once_share_the_check_of_their_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, may_end = [], threading.Event()

    def reason(check: object) -> str:
        checked.append(check)
        may_end.wait(30)
        return "it is wrong"

    monkeypatch.setattr(grammars, "_reason", reason)
    limits = RequestLimits(max_seq_len=100, vocab_size=320, eos_ids=(2,))
    checks = GrammarChecks(limits, ThreadPool(), has_tokenizer=True)
    options = SamplingOptions(grammar=GrammarSpec(kind="regex", text="a+"))

    async def work() -> None:
        calls = [asyncio.create_task(checks.check([options])) for _ in range(20)]
        await asyncio.sleep(0)
        calls[0].cancel()  # a client that leaves takes nothing from the others
        may_end.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, InvalidRequestError) for result in results[1:])
        with pytest.raises(InvalidRequestError, match="it is wrong"):
            await checks.check([options])

    asyncio.run(work())
    assert len(checked) == 1
