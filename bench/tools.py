"""Forces tool calls over HTTP with the official client, and validates each of them.

    python -m bench.tools [--prompts=100] [--schemas=36] [--name=tools] [--model=MODEL] [--option=value …]

A server of the bundled model, with a chat template that knows tools, answers prompts that all differ, each as
a stream. Half of them have to call some of several tools (``tool_choice: "required"``), half one tool that is
named. Parameters are random JSON schemas, whose strings and arrays are bounded. The calls are put together
from the deltas. Then some schemas are answered by four choices each (``n``), half of them streamed. Half of
all requests are greedy. Other options are those of ``segue serve``.

The bars: all calls are of tools that may be called, with arguments that jsonschema finds valid. Each reply
with calls ends with ``tool_calls``, each choice by a schema with ``stop``, and none by its length.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from bench import launch, report
from bench.guided import is_valid, random_schema

NUM_PROMPTS, NUM_SCHEMAS, CHOICES = 100, 36, 4
BATCH = 16  # requests at a time
MAX_TOKENS = 4096  # of a reply
END_S = 1800.0
# As chats of the bundled model are written, with calls as Hermes and Qwen have them. It leaves the parameters
# to the grammar, so that prompts are short.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nThese functions can be called:\n"
    "{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}"
    'Write a call as\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ACTIONS = (
    *("find", "book", "cancel", "order", "describe", "list", "move", "rename", "measure", "translate"),
    *("send", "archive"),
)
THINGS = ("weather", "train", "parcel", "table", "invoice", "garden", "letter", "river", "museum", "song")
PLACES = ("Cologne", "Lima", "Osaka", "Accra", "Turin", "Oslo", "Quito", "Perth", "Izmir", "Cork")
# Texts that look like the marks between which calls are written, but are arguments.
MARKS = {"enum": ["<tool_call>", "</tool_call>", '"}}\n</tool_call>', "{"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPrompt:
    """A question, the tools that the model gets, and the one that is named; None: it has to call any."""

    text: str
    tools: Sequence[dict[str, Any]]
    named: str | None

    @property
    def callable_schemas(self) -> dict[str, Any]:
        """The schemas of the tools that the reply may call, by their names."""
        found = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        return found if self.named is None else {self.named: found[self.named]}

    @property
    def choice(self) -> Any:
        """The field ``tool_choice``."""
        return "required" if self.named is None else {"type": "function", "function": {"name": self.named}}


def draw_prompt(rng: random.Random, number: int) -> ToolPrompt:
    """Return a prompt that has this number, with two to four tools; one is named in every second prompt."""
    names = [f"{rng.choice(ACTIONS)}_{thing}" for thing in rng.sample(THINGS, rng.randint(2, 4))]
    tools = []
    for name in names:
        schema = random_schema(rng)
        if rng.random() < 0.2:
            schema["properties"]["mark"], schema["required"] = MARKS, [*schema["required"], "mark"]
        function = {"name": name, "description": name.replace("_", " "), "parameters": schema}
        tools.append({"type": "function", "function": function})
    named = rng.choice(names) if number % 2 else None
    wish = (named or rng.choice(names)).replace("_", " the ")
    text = f"Please {wish} in {rng.choice(PLACES)}, for {number + 1} people."
    return ToolPrompt(text=text, tools=tools, named=named)


@dataclass(slots=True)
class StreamedCall:
    """What the deltas of one call say."""

    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: str = ""


@dataclass(slots=True)
class StreamedChoice:
    """One choice of a reply, put together from the chunks of a stream; chunks are as in JSON."""

    content: str = ""
    calls: dict[int, StreamedCall] = field(default_factory=dict)  # by index, in the order in which they came
    reasons: list[str] = field(default_factory=list)

    def take(self, choice: dict[str, Any]) -> None:
        """Take this choice's part of a chunk."""
        delta = choice["delta"]
        self.content += delta.get("content") or ""
        for part in delta.get("tool_calls") or []:
            call = self.calls.setdefault(part["index"], StreamedCall())
            function = part.get("function") or {}
            call.ids += [part["id"]] if part.get("id") else []
            call.names += [function["name"]] if function.get("name") else []
            call.arguments += function.get("arguments") or ""
        self.reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []


def faults_of_calls(reply: StreamedChoice, prompt: ToolPrompt) -> list[str]:
    """Return what is wrong with a reply that has to call tools; empty: nothing is."""
    schemas, faults = prompt.callable_schemas, []
    if reply.reasons != ["tool_calls"]:
        faults.append(f"ended with {reply.reasons}")
    if reply.content:
        faults.append(f"has the content {reply.content!r}")
    if list(reply.calls) != [*range(len(reply.calls))] or not reply.calls:
        faults.append(f"has calls with the indices {list(reply.calls)}")
    if prompt.named is not None and len(reply.calls) != 1:
        faults.append(f"has {len(reply.calls)} calls of the function that is named")
    ids = [each for call in reply.calls.values() for each in call.ids]
    if len({*ids}) != len(reply.calls) or len(ids) != len(reply.calls):
        faults.append(f"has {len(reply.calls)} calls with the ids {ids}")
    for call in reply.calls.values():
        if len(call.names) != 1 or call.names[0] not in schemas:
            faults.append(f"calls {call.names}, and may call {list(schemas)}")
        elif not is_valid(call.arguments, schemas[call.names[0]]):
            faults.append(
                f"calls {call.names[0]} with {call.arguments!r} by {json.dumps(schemas[call.names[0]])}"
            )
    return faults


def faults_of_choices(choices: Sequence[StreamedChoice], schema: dict[str, Any], count: int) -> list[str]:
    """Return what is wrong with the choices of a reply that has to follow a schema."""
    faults = [] if len(choices) == count else [f"has {len(choices)} choices of {count}"]
    for index, choice in enumerate(choices):
        if choice.reasons != ["stop"]:
            faults.append(f"choice {index} ended with {choice.reasons}")
        if choice.calls or not is_valid(choice.content, schema):
            faults.append(f"choice {index} is {choice.content!r} by {json.dumps(schema)}")
    return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A reply, and what is wrong with it."""

    num_calls: int  # or choices
    by_length: bool
    num_tokens: int
    faults: Sequence[str]


class ToolClient:
    """Asks a server, and judges its replies."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=END_S)
        self._model = self._client.models.list().data[0].id

    def ask_for_call(self, prompt: ToolPrompt, number: int) -> Judged:
        """Stream the reply to a prompt; odd pairs of numbers are drawn, the others greedy."""
        (reply,), tokens = self._choices(
            1,
            stream=True,
            messages=[{"role": "user", "content": prompt.text}],
            tools=prompt.tools,
            tool_choice=prompt.choice,
            temperature=number // 2 % 2,
            seed=number,
        )
        return Judged(
            num_calls=len(reply.calls),
            by_length="length" in reply.reasons,
            num_tokens=tokens,
            faults=faults_of_calls(reply, prompt),
        )

    def ask_for_choices(self, schema: dict[str, Any], number: int) -> Judged:
        """Get four choices that follow a schema, streamed for odd numbers."""
        form = {"name": "answer", "schema": schema, "strict": True}
        text = f"Number {number}: answer with a JSON object that fits this schema: {json.dumps(schema)}"
        choices, tokens = self._choices(
            CHOICES,
            stream=number % 2 == 1,
            messages=[{"role": "user", "content": text}],
            response_format={"type": "json_schema", "json_schema": form},
            n=CHOICES,
            temperature=number // 2 % 2,
            seed=number,
        )
        return Judged(
            num_calls=len(choices),
            by_length=any("length" in choice.reasons for choice in choices),
            num_tokens=tokens,
            faults=faults_of_choices(choices, schema, CHOICES),
        )

    def _choices(self, count: int, *, stream: bool, **fields: Any) -> tuple[list[StreamedChoice], int]:
        """Return the choices of a reply, whether or not it is streamed, and the number of their tokens."""
        ask: dict[str, Any] = {"model": self._model, "max_tokens": MAX_TOKENS, **fields}
        found: dict[int, StreamedChoice] = {index: StreamedChoice() for index in range(count)}
        if stream:
            chunks = self._client.chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
            usage = None
            for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.model_dump()["choices"]:
                    found.setdefault(choice["index"], StreamedChoice()).take(choice)
        else:
            whole = self._client.chat.completions.create(**ask)
            usage = whole.usage
            for choice in whole.model_dump()["choices"]:
                found.setdefault(choice["index"], StreamedChoice()).take(
                    {**choice, "delta": choice["message"]}
                )
        return [found[index] for index in sorted(found)], 0 if usage is None else usage.completion_tokens


def judged(work: Sequence[tuple[str, Callable[[], Judged]]]) -> dict[str, list[Judged]]:
    """Do all work, ``BATCH`` at a time; returns the replies per kind."""
    replies: dict[str, list[Judged]] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(BATCH) as pool:
        kinds = {pool.submit(each): kind for kind, each in work}
        for count, future in enumerate(as_completed(kinds), 1):
            replies.setdefault(kinds[future], []).append(future.result())
            if count % 20 == 0 or count == len(work):
                print(f"{count} of {len(work)} replies, {time.monotonic() - began:.0f} s", flush=True)
    return replies


def figures_of(replies: Sequence[Judged]) -> dict[str, Any]:
    """Return the figures of one kind of replies."""
    return {
        "replies": len(replies),
        "valid": sum(not reply.faults for reply in replies),
        "by_length": sum(reply.by_length for reply in replies),
        "calls": sum(reply.num_calls for reply in replies),
        "tokens": sum(reply.num_tokens for reply in replies),
        "most_tokens": max(reply.num_tokens for reply in replies),
        "faults": [fault for reply in replies for fault in reply.faults],
    }


def measure(url: str, num_prompts: int = NUM_PROMPTS, num_schemas: int = NUM_SCHEMAS) -> dict[str, Any]:
    """Ask a server, whose template knows tools; returns the figures per kind of request."""
    rng, client = random.Random(0), ToolClient(url)
    work: list[tuple[str, Callable[[], Judged]]] = []
    for number in range(num_prompts):
        prompt = draw_prompt(rng, number)
        kind = "required" if prompt.named is None else "named"
        work.append((kind, lambda prompt=prompt, number=number: client.ask_for_call(prompt, number)))
    for number in range(num_schemas):
        schema = random_schema(rng)
        kind = f"n = {CHOICES}"
        work.append((kind, lambda schema=schema, number=number: client.ask_for_choices(schema, number)))
    return {kind: figures_of(replies) for kind, replies in judged(work).items()}


def write_template(directory: Path) -> Path:
    """Write the chat template into a file, for ``--chat-template``."""
    path = directory / "tools.jinja"
    path.write_text(TEMPLATE)
    return path


def is_perfect(figures: dict[str, dict[str, Any]]) -> bool:
    """Whether all bars hold."""
    return all(each["valid"] == each["replies"] and not each["by_length"] for each in figures.values())


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="tools", help="of the file in bench/results")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS)
    parser.add_argument("--model", help="as in segue serve; by default the bundled one")
    args, options = parser.parse_known_args()
    options += [] if args.model is None else ["--model", args.model]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        own = ["--chat-template", str(write_template(Path(directory))), "--max-running-requests", str(BATCH)]
        with launch.served(*own, *options) as url:
            figures = measure(url, args.prompts, args.schemas)
    for kind, each in figures.items():
        for fault in each["faults"][:5]:
            print(f"{kind}: a reply {fault}")
    rows = [
        (
            kind,
            *(str(each["replies"]), f"{100 * each['valid'] / each['replies']:g} %", str(each["by_length"])),
            *(str(each[name]) for name in ("calls", "tokens", "most_tokens")),
        )
        for kind, each in figures.items()
    ]
    title = f"{args.prompts} prompts that force calls, {args.schemas} schemas"
    report.show(
        title, ["", "replies", "valid", "ended by length", "calls or choices", "tokens", "of one reply"], rows
    )
    load = subprocess.run(["uptime"], capture_output=True, text=True).stdout.strip()
    more = {"seconds": round(time.monotonic() - began, 1), "load": load, "options": options}
    print(f"written to {report.save(args.name, {**more, 'kinds': figures})}")
    return 0 if is_perfect(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
