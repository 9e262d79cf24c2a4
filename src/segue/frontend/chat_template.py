"""What a model's chat template says about the model: which arguments it uses, and how replies are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3-json"]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template, or the several ones of a model, of which one is for tools, as one text."""

    text: str = ""  # empty: there is none

    @classmethod
    def of(cls, template: str | Mapping[str, Any] | None) -> ChatTemplate:
        """Take the template of a tokenizer of transformers."""
        return cls("\n".join(template.values()) if isinstance(template, Mapping) else template or "")

    def uses(self, argument: str) -> bool:
        """Whether the template has a word, such as the name of an argument."""
        return re.search(rf"\b{argument}\b", self.text) is not None

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None: in a form that is not known, or not at all.

        Other models use the mark of Hermes, too, around another form, which their templates show.
        """
        text = self.text
        if "<tool_call>" in text and "<function=" not in text and "<arg_key>" not in text:
            return "hermes"
        if "<|python_tag|>" in text or ('"parameters"' in text and "ipython" in text):
            return "llama3-json"
        return None

    @property
    def has_think(self) -> bool:
        """Whether the model writes reasoning within ``<think>`` and ``</think>``."""
        return "<think>" in self.text


NO_TEMPLATE = ChatTemplate()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """How the texts of a model's chats are understood."""

    template: ChatTemplate = NO_TEMPLATE
    tools: ToolFormat | None = None  # how it writes tool calls; None: they are not looked for
    thinks: bool = False  # whether reasoning is looked for


NO_FORM = ChatForm()
