"""Teacher forcing through the public API: every token is judged after the reference's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fixtures.reference import NEAR_TIE, NUM_TOKENS, Case


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The result of comparing all tokens of all cases with the reference."""

    wrong: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)  # different tokens where the reference has a near tie
    different_texts: list[str] = field(default_factory=list)  # cases whose text differs in the first round
    first_round: list[dict[str, Any]] = field(default_factory=list)


def greedy(num_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}


def judge(engine: Any, cases: Sequence[Case], **options: Any) -> Verdict:
    """Generates all cases at once, and judges every token.

    As long as a case agrees, it is conditioned on the reference's tokens. After a token that differs, the
    case is generated again from the reference's token, until every position is judged. ``options`` go to
    ``Engine.generate``.
    """
    verdict = Verdict()
    pending = {case.name: 0 for case in cases}
    by_name = {case.name: case for case in cases}
    while pending:
        names = list(pending)
        replies = engine.generate(
            input_ids=[
                by_name[name].prompt_ids + by_name[name].output_ids[: pending[name]] for name in names
            ],
            sampling_params=[greedy(NUM_TOKENS - pending[name]) for name in names],
            **options,
        )
        if not verdict.first_round:
            verdict.first_round = replies
            verdict.different_texts = [
                name
                for name, reply in zip(names, replies, strict=True)
                if reply["text"] != by_name[name].text
            ]
        for name, reply in zip(names, replies, strict=True):
            start = pending.pop(name)
            following = _compare(by_name[name], start, reply["output_ids"], verdict)
            if following < NUM_TOKENS:
                pending[name] = following
    return verdict


def _compare(case: Case, start: int, tokens: Sequence[int], verdict: Verdict) -> int:
    """Judges up to the first difference, and returns the next position to judge."""
    expected = case.output_ids[start:]
    assert len(tokens) == len(expected), f"{case.name}: {len(tokens)} tokens, not {len(expected)}"
    for position, (token, right) in enumerate(zip(tokens, expected, strict=True), start):
        if token != right:
            margin = case.margins[position]
            finding = f"{case.name}[{position}]: {token} instead of {right}, margin {margin:.6f}"
            (verdict.excused if margin < NEAR_TIE else verdict.wrong).append(finding)
            return position + 1
    return NUM_TOKENS
