"""What a client has of its reply, from however many legs it came.

A leg that goes on where another one was lost must know each token that the client has already: its payload
begins behind them. The frames name these tokens, and they are kept here until the reply has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from segue.messages.leg import LegOutput

ID_BYTES = 4  # of a token, as int32


@dataclass(slots=True)
class _PromptOutput:
    """The output of one prompt so far, in the form of `LegOutput`."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    end: bytes = b""


class Splice:
    """The tokens of one reply, by prompt, in the order in which the frames of all legs named them."""

    def __init__(self) -> None:
        self._prompts: dict[int, _PromptOutput] = {}
        self.num_frames = 0  # with tokens; it grows whenever there is something new

    def take(self, outputs: Sequence[LegOutput]) -> None:
        """Take what one frame names. Call this for whole frames only, and before the payload is passed on."""
        for output in outputs:
            prompt = self._prompts.get(output.index)
            if prompt is None:
                prompt = self._prompts[output.index] = _PromptOutput()
            prompt.ids += output.ids
            if output.logprobs:
                prompt.logprobs += output.logprobs
            if output.end:
                prompt.end = output.end
            self.num_frames += 1

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts together."""
        return sum(len(prompt.ids) for prompt in self._prompts.values()) // ID_BYTES

    def outputs(self) -> list[LegOutput]:
        """Returns the outputs for a further leg, by index: one per prompt that has any."""
        return [
            LegOutput(index, bytes(prompt.ids), bytes(prompt.logprobs), prompt.end)
            for index, prompt in sorted(self._prompts.items())
        ]
