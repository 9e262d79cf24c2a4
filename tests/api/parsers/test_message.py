"""Texts of models, and what they consist of: in one piece, and in any others."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from segue.api.parsers.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from segue.api.parsers.message import MessageFormat, MessageParser

NAMES = frozenset({"get_weather", "add"})
HERMES = MessageFormat(tools="hermes", names=NAMES, thinks=True)
THINKING = MessageFormat(tools="hermes", names=NAMES, thinks=True, thinking=True)
MARKED = MessageFormat(tools="hermes", names=NAMES, shows_marks=True)
MARKED_LLAMA = MessageFormat(tools="llama3-json", names=NAMES, shows_marks=True, thinking=True)
LLAMA = MessageFormat(tools="llama3-json", names=NAMES)
PARIS = '{"city": "Paris \\u00e9\\" \\ud83d\\ude00}", "days": [1, -2.5e3, {"a": null}], "x": {}}'
WEATHER = f'{{"name": "get_weather", "arguments": {PARIS}}}'

Part = tuple[str, str] | tuple[str, str, str]


def joined(events: list[Event]) -> list[Part]:
    """Events with neighbouring texts joined."""
    parts: list[list[str]] = []
    for event in events:
        match event:
            case CallEnd():
                parts.append(["end", ""])
            case CallBroken(raw, rest):
                parts.append(["broken", raw, rest])
            case CallBegin(name):
                parts.append(["call", name])
            case Content(text) | Reasoning(text) | Arguments(text):
                kind = type(event).__name__.lower()
                assert text
                if parts and parts[-1][0] == kind:
                    parts[-1][1] += text
                else:
                    parts.append([kind, text])
    return [tuple(part) for part in parts]  # type: ignore[misc]


def parse(form: MessageFormat, *pieces: str) -> list[Part]:
    parser = MessageParser(form)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def call(name: str, arguments: str) -> list[Part]:
    return [("call", name), ("arguments", arguments), ("end", "")]


HERMES_CASES: dict[str, list[Part]] = {
    "": [],
    "Hello": [("content", "Hello")],
    " \n a < b <tool> c \n": [("content", " \n a < b <tool> c \n")],
    f"<tool_call>\n{WEATHER}\n</tool_call>": call("get_weather", PARIS),
    f'I look.\n\n<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name":"add"}}</tool_call>\n': [
        ("content", "I look."),
        *call("get_weather", PARIS),
        *call("add", "{}"),
    ],
    f"<tool_call>{WEATHER}</tool_call> So.\n": [*call("get_weather", PARIS), ("content", "So.\n")],
    # The name behind the arguments; arguments as a string, and as null; members that say nothing.
    '<tool_call>{"parameters": {"a": [1]}, "name": "add"}</tool_call>': call("add", '{"a": [1]}'),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>': call("add", '{"a": 1}'),
    '<tool_call>{"name": "add", "arguments": null, "id": 7}</tool_call>': call("add", "{}"),
    '<tool_call>{"name": "other", "why": {"name": 1}}</tool_call>': call("other", "{}"),
    # Complete but for the marks and brackets at the end.
    f"<tool_call>{WEATHER}": call("get_weather", PARIS),
    f"<tool_call>{WEATHER}</tool_": [*call("get_weather", PARIS), ("content", "</tool_")],
    '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>': call("add", '{"a": 1}'),
    # No calls.
    "a\n<tool_call>": [("content", "a"), ("broken", "\n<tool_call>", "\n<tool_call>")],
    "<tool_call>{}</tool_call>": [
        ("broken", "<tool_call>{", "<tool_call>{"),
        ("content", "}</tool_call>"),
    ],
    '<tool_call>{"name": "add", "arguments": 7}': [
        ("broken", '<tool_call>{"name": "add", "arguments": ', '<tool_call>{"name": "add", "arguments": '),
        ("content", "7}"),
    ],
    '<tool_call>{"name": "add", "arguments": {"a": tru, 1}}': [
        ("call", "add"),
        ("arguments", '{"a": tru'),
        ("broken", '<tool_call>{"name": "add", "arguments": {"a": tru', ""),
        ("content", ", 1}}"),
    ],
    '<tool_call>{"name": "add", "arguments": {"a": 1}, "b" 2}': [
        ("call", "add"),
        ("arguments", '{"a": 1}'),
        ("broken", '<tool_call>{"name": "add", "arguments": {"a": 1}, "b" ', ', "b" '),
        ("content", "2}"),
    ],
    '<tool_call>{"name": "add", "arguments": {"a": "b': [
        ("call", "add"),
        ("arguments", '{"a": "b'),
        ("broken", '<tool_call>{"name": "add", "arguments": {"a": "b', ""),
    ],
    # Reasoning.
    f"<think>\nOh <tool_call>.\n</think>\n\nYes\n<tool_call>{WEATHER}</tool_call>": [
        ("reasoning", "Oh <tool_call>."),
        ("content", "Yes"),
        *call("get_weather", PARIS),
    ],
    "\n<think>\n\n</think>\n\nYes": [("content", "Yes")],
    "\n<thin": [("content", "\n<thin")],
    "<think> on </thin": [("reasoning", "on </thin")],
    "a <think>b</think>": [("content", "a <think>b</think>")],
}
THINKING_CASES: dict[str, list[Part]] = {
    "\nOh.\n</think>\nYes": [("reasoning", "Oh."), ("content", "Yes")],
    "<think>\nOh.</think>Yes": [("reasoning", "Oh."), ("content", "Yes")],
    "</think>Yes": [("content", "Yes")],
    "<th": [("reasoning", "<th")],
    " \n": [],
}
LLAMA_WEATHER = WEATHER.replace("arguments", "parameters")
LLAMA_CASES: dict[str, list[Part]] = {
    f"\n{LLAMA_WEATHER}": call("get_weather", PARIS),
    f"<|python_tag|>{LLAMA_WEATHER}": call("get_weather", PARIS),
    f"Look: <|python_tag|>{LLAMA_WEATHER}\n": [("content", "Look:"), *call("get_weather", PARIS)],
    f'{LLAMA_WEATHER}; {{"type": "function", "name": "add"}} ,<|python_tag|>{{"name": "add"}}': [
        *call("get_weather", PARIS),
        *call("add", "{}"),
        *call("add", "{}"),
    ],
    f"{LLAMA_WEATHER}; done": [*call("get_weather", PARIS), ("content", "; done")],
    '{"name": "Bob", "parameters": {}}': [
        ("broken", '{"name": "Bob', '{"name": "Bob'),
        ("content", '", "parameters": {}}'),
    ],
    '{"answer": 42}': [("broken", '{"answer": ', '{"answer": '), ("content", "42}")],
    '<|python_tag|>search.call(query="x")': [
        ("broken", "<|python_tag|>", "<|python_tag|>"),
        ("content", 'search.call(query="x")'),
    ],
    'a {"name": "add"} <|python': [("content", 'a {"name": "add"} <|python')],
}
MARKED_CASES: dict[str, list[Part]] = {
    f"\n<think>\nOh <tool_call>{WEATHER}.\n</think>\n\n<tool_call>{WEATHER}</tool_call>": [
        ("content", f"\n<think>\nOh <tool_call>{WEATHER}.\n</think>"),
        *call("get_weather", PARIS),
    ],
    "<think>\nOh.\n</think>\n\nYes": [("content", "<think>\nOh.\n</think>\n\nYes")],
    f"Yes\n<tool_call>{WEATHER}</tool_call>": [("content", "Yes"), *call("get_weather", PARIS)],
    "<think> on </thin": [("content", "<think> on </thin")],
    "\n<thin": [("content", "\n<thin")],
}
MARKED_LLAMA_CASES: dict[str, list[Part]] = {
    f'{{"name": "add"}} </think>\n\n{LLAMA_WEATHER}': [
        ("content", '{"name": "add"} </think>'),
        *call("get_weather", PARIS),
    ],
    "<think>Oh.</think>Yes": [("content", "<think>Oh.</think>Yes")],
    "</th": [("content", "</th")],
    " ": [("content", " ")],
}
CASES = [
    *((HERMES, *case) for case in HERMES_CASES.items()),
    *((THINKING, *case) for case in THINKING_CASES.items()),
    *((LLAMA, *case) for case in LLAMA_CASES.items()),
    *((MARKED, *case) for case in MARKED_CASES.items()),
    *((MARKED_LLAMA, *case) for case in MARKED_LLAMA_CASES.items()),
]


@pytest.mark.parametrize(("form", "text", "parts"), CASES)
def test_a_text_in_one_piece(form: MessageFormat, text: str, parts: list[Part]) -> None:
    assert parse(form, text) == parts
    for kind, *texts in parts:
        if kind == "arguments" and ("end", "") in parts and len(parts) == 3:
            assert isinstance(json.loads(texts[0]), dict)


STARTS = ["", "<tool_call>", '<tool_call>{"name": "add", "arguments": {', "<think>", '{"name": "add", ']


def texts(generator: random.Random) -> str:
    """Any text, made of the parts that matter."""
    words = [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "<tool", " ", "\n"),
        *(" " * 70, "a", "{", "}", "[", "]", '"', "\\", ":", ",", "1", "-", "e", "true", "nul", ";", "\\u12"),
        *('{"name": "add", ', '"arguments": ', '"parameters": ', WEATHER, LLAMA_WEATHER, '{"name": "add"}'),
    ]
    return "".join(generator.choices(words, k=generator.randrange(14)))


def test_what_a_parser_has_given_depends_on_the_text_and_not_on_its_pieces() -> None:
    """Also in the middle: who goes on with a reply elsewhere has a parser that was fed the text so far."""
    generator = random.Random(7)
    cases: list[tuple[MessageFormat, str]] = [(form, text) for form, text, _ in CASES]
    cases += [
        (form, generator.choice(STARTS) + texts(generator))
        for form in (HERMES, THINKING, LLAMA, MARKED, MARKED_LLAMA)
        for _ in range(150)
    ]
    for form, text in cases:
        whole = parse(form, text)
        cuts = sorted(generator.choices(range(len(text) + 1), k=generator.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(form, *pieces) == parse(form, *text) == whole, text
        half, by_letter = MessageParser(form), MessageParser(form)
        middle = generator.randrange(len(text) + 1)
        at_once = joined(half.push(text[:middle]))
        assert at_once == joined([e for letter in text[:middle] for e in by_letter.push(letter)]), text[
            :middle
        ]


def test_nothing_is_lost_where_no_call_is_complete() -> None:
    generator = random.Random(11)
    num_begun = 0
    for _ in range(300):
        form = generator.choice([MessageFormat(tools="hermes"), LLAMA, MARKED, MARKED_LLAMA])
        text = generator.choice(STARTS) + texts(generator)
        parts = parse(form, text)
        if ("end", "") in parts:
            continue
        # In a whole reply a broken call is text again.
        assert "".join(part[1] for part in parts if part[0] in ("content", "broken")) == text
        # In a stream its name and some of its arguments were given already.
        for before, part in pairwise(parts):
            if part[0] == "broken" and before[0] == "arguments":
                num_begun += 1
                assert part[1].endswith(before[1] + part[2])  # type: ignore[misc]
    assert num_begun


@pytest.mark.parametrize("value", [0, -1.5e-7, 'a\n"\\é😀', [[]], {"a": {"b": [True, False, None]}}, 10**300])
def test_any_json_is_taken_as_arguments(value: Any) -> None:
    for text in (json.dumps({"v": value}), json.dumps({"v": value}, ensure_ascii=False, indent=2)):
        (_, (_, arguments), _) = parse(HERMES, f'<tool_call>{{"name": "add", "arguments": {text}}}')  # type: ignore[misc]
        assert arguments == text


@pytest.mark.parametrize(
    "text",
    [
        "01",
        "1.",
        ".5",
        "1e",
        "--1",
        "+1",
        "truth",
        "NaN",
        "'a'",
        '"\t"',
        '"\\x"',
        '"\\u12g4"',
        "[1,]",
        "[,]",
        "{1:2}",
    ],
)
def test_what_is_no_json_breaks_a_call(text: str) -> None:
    parts = parse(HERMES, f'<tool_call>{{"name": "add", "arguments": {{"v": {text}}}}}</tool_call>')
    assert "broken" in [kind for kind, *_ in parts] and ("end", "") not in parts
