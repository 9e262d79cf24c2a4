"""The two classes of prompts: short ones, and long ones that others should not have to wait behind."""

from __future__ import annotations

from typing import Literal

from segue.laps.cost import NO_WORK, Coefficients, seconds_of

PromptClass = Literal["short", "long"]
HARDLY_LONGER = 1.05


def classify(tokens: int, history: int, threshold: int, coefficients: Coefficients) -> PromptClass:
    """Returns the class of a prompt of which ``tokens`` are still to be computed, behind ``history`` others.

    A prompt is short if it has at most ``threshold`` such tokens, or takes hardly longer than ``threshold``
    tokens without a history. A later turn of a chat is therefore short if its earlier turns are cached.
    """
    if tokens <= threshold:
        return "short"
    prompt = NO_WORK.plus(tokens, history)
    limit = seconds_of(coefficients, NO_WORK.plus(threshold, 0))
    return "short" if 0 < seconds_of(coefficients, prompt) <= HARDLY_LONGER * limit else "long"
