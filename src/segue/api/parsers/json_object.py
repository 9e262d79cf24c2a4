"""Scans one JSON object while its text comes: where its members begin and end, and where it is no JSON."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

MAX_DEPTH = 128  # of brackets
MAX_SCALAR_CHARS = 400  # of a number
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string, without escapes
_SPACES = re.compile(r"[ \t\n\r]+")
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]")
# What a number may begin with, and what it may be.
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*|(?:\.\d+)?[eE][+-]?\d*)?)?", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = ("true", "false", "null")

# What comes next: the object; a value; a value or the end of a list; a name; a name or the end of an object;
# a colon; a comma or an end; a part of a string, of an escape in it, of a number or word; nothing.
State = Literal[
    "begin",
    "value",
    "first",
    "name",
    "first_name",
    "colon",
    "after",
    "string",
    "escape",
    "hex",
    "scalar",
    "end",
]


class MalformedError(ValueError):
    """The text is no JSON object."""


class ObjectScanner:
    """The state behind the text so far. After :meth:`step` the attributes say what the piece was."""

    def __init__(self) -> None:
        self.state: State = "begin"
        self.key = ""  # of the object's current member
        self.in_value = False  # whether the piece is part of that member's value
        self.value_ended = False  # whether that value ends with the piece, which may be empty
        self._brackets: list[str] = []
        self._is_name = False  # whether the string that is being read is a name
        self._name = ""  # that string so far, if it is a name of the object's own
        self._num_digits = 0  # that an escape still needs
        self._scalar = ""

    def step(self, text: str, at: int) -> int:
        """Take the longest piece of one kind from the place ``at``; returns where the next one begins.

        A number or a word ends before the character behind it: that is a piece without text.

        Raises:
            MalformedError: no JSON object goes on with the character there.
        """
        state, depth = self.state, len(self._brackets)
        if state in ("string", "escape", "hex"):
            is_value = not self._is_name
            end = self._in_string(text, at)
        elif state == "scalar":
            is_value = True
            end = self._in_scalar(text[at], at)
        elif space := _SPACES.match(text, at):
            is_value = False
            end = space.end()
        else:
            is_value = state == "value"
            self._between(text[at])
            end = at + 1
        self.in_value = depth > 1 or (depth == 1 and is_value)
        self.value_ended = self.in_value and self.state == "after" and len(self._brackets) == 1
        return end

    def _between(self, char: str) -> None:
        """Take a character that is no part of a string or scalar, and no white space."""
        match self.state, char:
            case "begin", "{":
                self._open(char)
            case (("value" | "first"), ("{" | "[")):
                self._open(char)
            case (("value" | "first"), '"'):
                self._begin_string(is_name=False)
            case (("name" | "first_name"), '"'):
                self._begin_string(is_name=True)
            case "colon", ":":
                self.state = "value"
            case "after", ",":
                self.state = "name" if self._brackets[-1] == "{" else "value"
            case (("after" | "first_name"), "}") if self._brackets[-1] == "{":
                self._close()
            case (("after" | "first"), "]") if self._brackets[-1] == "[":
                self._close()
            case (("value" | "first"), _) if _begins_scalar(char):
                self.state, self._scalar = "scalar", char
            case _:
                raise MalformedError

    def _open(self, bracket: str) -> None:
        if len(self._brackets) == MAX_DEPTH:
            raise MalformedError
        self._brackets.append(bracket)
        self.state = "first_name" if bracket == "{" else "first"

    def _close(self) -> None:
        self._brackets.pop()
        self.state = "after" if self._brackets else "end"

    def _begin_string(self, *, is_name: bool) -> None:
        self.state, self._is_name, self._name = "string", is_name, ""

    def _in_string(self, text: str, at: int) -> int:
        """Take a part of a string: plain characters, or one character of an escape, or the closing quote."""
        char, end = text[at], at + 1
        if self.state == "escape":
            if char not in '"\\/bfnrtu':
                raise MalformedError
            self.state, self._num_digits = ("hex", 4) if char == "u" else ("string", 0)
        elif self.state == "hex":
            if char not in "0123456789abcdefABCDEF":
                raise MalformedError
            self._num_digits -= 1
            self.state = "hex" if self._num_digits else "string"
        elif char == "\\":
            self.state = "escape"
        elif char == '"':
            self.state = "colon" if self._is_name else "after"
        elif plain := _PLAIN.match(text, at):
            end = plain.end()
        else:  # a control character
            raise MalformedError
        if self._is_name and len(self._brackets) == 1:
            if self.state == "colon":
                self.key = msgspec.json.decode(f'"{self._name}"'.encode(errors="replace"), type=str)
            self._name += text[at:end]
        return end

    def _in_scalar(self, char: str, at: int) -> int:
        if _SCALAR_CHARS.match(char):
            self._scalar += char
            if not _begins_scalar(self._scalar):
                raise MalformedError
            return at + 1
        if not (self._scalar in _WORDS or _NUMBER.fullmatch(self._scalar)):
            raise MalformedError
        self.state = "after"
        return at


def _begins_scalar(text: str) -> bool:
    """Whether a number, or one of the words of JSON, begins with a text, which is not empty."""
    if len(text) > MAX_SCALAR_CHARS:
        return False
    return any(word.startswith(text) for word in _WORDS) or bool(_NUMBER_SO_FAR.fullmatch(text))
