"""The two classes of prompts: short ones, and long ones that others should not have to wait behind."""

from __future__ import annotations

from typing import Literal

from segue.laps.cost import Coefficients, prompt_seconds

PromptClass = Literal["short", "long"]
HARDLY_LONGER = 1.05


def classify(tokens: int, history: int, threshold: int, coefficients: Coefficients) -> PromptClass:
    """Returns the class of a prompt of which ``tokens`` are still to be computed, behind ``history`` others.

    A prompt is short if it has at most ``threshold`` such tokens, or takes hardly longer than ``threshold``
    tokens without a history. A later turn of a chat is therefore short if its earlier turns are cached.
    """
    if tokens <= threshold:
        return "short"
    limit = HARDLY_LONGER * prompt_seconds(coefficients, threshold, 0)
    return "short" if 0 < prompt_seconds(coefficients, tokens, history) <= limit else "long"
