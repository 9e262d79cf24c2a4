"""What is refused of a grammar before any token is known, and what is not."""

from __future__ import annotations

import json

import pytest

from segue.guided import beginning
from segue.guided.grammars import GrammarError, check
from segue.messages.guided import GrammarSpec


def test_a_schema_may_be_true_and_nothing_fits_false() -> None:
    check(GrammarSpec("json_schema", " true\n"))
    with pytest.raises(GrammarError, match="no JSON fits the schema false; give"):
        check(GrammarSpec("json_schema", "false"))


def test_what_takes_too_long_to_begin_is_refused_before_an_engine_has_to_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = GrammarSpec("regex", "((a{60}){60}){60}")
    too_slow = r"its first tokens take \d\.\d\d s to find, and may take 0\.01 s"
    with monkeypatch.context() as here, pytest.raises(GrammarError, match=too_slow):
        here.setattr(beginning, "MAX_MASK_S", 0.01)  # it takes about 0.1 s
        check(slow)
    dates = {f"p{index}": {"type": "string", "format": "date"} for index in range(300)}
    many = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": dates}))
    check(many)
    monkeypatch.setattr(beginning, "MAX_COMPILE_S", 0.001)
    monkeypatch.setattr(beginning, "ACCEPTED_PATIENCE", 10_000)
    check(many, is_accepted=True)  # another engine, on a faster machine, has accepted it
    check(slow, is_accepted=True)
    with pytest.raises(GrammarError, match=r"it takes \d\.\d s to compile, and may take 0\.001 s"):
        check(many)
