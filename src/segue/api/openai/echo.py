"""``echo`` of completions: text and logprobs of a choice begin with those of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from segue.frontend.detokenizer import Detokenizer, TokenTable
from segue.frontend.request import LOWEST_LOGPROB
from segue.messages.requests import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """One prompt as its choice shows it."""

    text: str
    ids: Sequence[int]
    offsets: list[int]  # where each token begins in the text

    @classmethod
    def of(cls, prompt: str | Sequence[int], ids: Sequence[int], table: TokenTable) -> Echo:
        """Make the echo of a prompt that became ``ids``.

        A text is shown as the client sent it. A special token that the tokenizer has added to it is no part
        of it, and takes up none of it. Token ids are shown as their text, special tokens included.
        """
        detokenizer = Detokenizer(table, skip_special_tokens=False)
        offsets, parts, at = [], [], 0
        for token in ids:
            piece = detokenizer.push(token)
            if isinstance(prompt, str):
                offsets.append(min(at, len(prompt)))
                if token in table.special_ids and not prompt.startswith(piece, at):
                    piece = ""
            else:
                offsets.append(at)
                parts.append(piece)
            at += len(piece)
        text = prompt if isinstance(prompt, str) else "".join(parts) + detokenizer.flush()
        return cls(text=text, ids=ids, offsets=offsets)

    def shifted(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return the logprobs of output with their offsets in the text that begins with the prompt."""
        return logprobs | {"text_offset": [len(self.text) + offset for offset in logprobs["text_offset"]]}

    def logprobs(
        self, entries: Sequence[TokenLogprob], num_top: int, name: Callable[[int], str]
    ) -> dict[str, Any]:
        """Return the logprobs of the prompt, as completions have them.

        Nothing predicts the first token: its values are None.

        Args:
            entries: of each prompt token but the first.
            num_top: how many of the likeliest tokens are shown.
            name: writes a token.
        """
        tops = [
            {name(token): max(logprob, LOWEST_LOGPROB) for token, logprob in entry.top[:num_top]} or None
            for entry in entries
        ]
        return {
            "tokens": [name(token) for token in self.ids],
            "token_logprobs": [None, *(max(entry.logprob, LOWEST_LOGPROB) for entry in entries)],
            "top_logprobs": [None, *tops],
            "text_offset": self.offsets,
        }
