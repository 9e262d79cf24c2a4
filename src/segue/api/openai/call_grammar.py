"""The grammar of a reply that has to call tools, in the form in which the model writes calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from segue.api.openai.chat_fields import Tool, forced_tools
from segue.api.parsers import hermes, reasoning
from segue.errors import InvalidRequestError
from segue.frontend.chat_template import ChatForm, ToolFormat
from segue.frontend.sampling_options import SamplingOptions
from segue.guided.formats import bounded
from segue.guided.grammars import JSON_SPACE, MAX_GRAMMAR_BYTES
from segue.messages.guided import GrammarSpec

if TYPE_CHECKING:
    from segue.api.openai.requests import ChatCompletionRequest

# Of one reply: a model that repeats itself would otherwise call until its tokens run out.
MAX_CALLS = 16
_BEFORE: dict[ToolFormat, str] = {"hermes": f"{hermes.OPEN}\n", "llama3-json": ""}
_BEHIND: dict[ToolFormat, str] = {"hermes": f"\n{hermes.CLOSE}", "llama3-json": ""}
_ARGUMENTS: dict[ToolFormat, str] = {"hermes": "arguments", "llama3-json": "parameters"}
_BETWEEN: dict[ToolFormat, str] = {"hermes": "\n", "llama3-json": "; "}


def with_forced_call(
    options: SamplingOptions, body: ChatCompletionRequest, chat: ChatForm, thinking: bool
) -> SamplingOptions:
    """Return options by which the reply calls a tool, if the body wants one in any case.

    ``thinking``: whether the prompt has begun the reasoning.

    Raises:
        InvalidRequestError: another field guides the output, too, or the tools make too large a grammar.
    """
    if not (tools := forced_tools(body)):
        return options
    name = "tool_choice"
    if options.grammar is not None:
        both = f"{name} and {options.names['grammar']} both guide the output"
        raise InvalidRequestError(f"{both}; give one of them, or tool_choice auto", param=name)
    assert chat.tools is not None, "else check_tools has refused them"
    text = call_grammar(
        tools,
        chat.tools,
        several=body.tool_choice == "required" and body.parallel_tool_calls is not False,
        thinks=chat.thinks,
        thinking=thinking,
    )
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_GRAMMAR_BYTES:
        most = f"makes a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        rest = "give fewer or smaller tools, or tool_choice auto"
        raise InvalidRequestError(f"{name}: a call of one of {len(tools)} tools {most}: {rest}", param=name)
    names = {**options.names, "grammar": name}
    return replace(options, grammar=GrammarSpec("grammar", text), names=names)


def call_grammar(
    tools: Sequence[Tool], form: ToolFormat, *, several: bool, thinks: bool, thinking: bool
) -> str:
    """Return the grammar, in Lark's notation as llguidance takes it: one call of one of the tools.

    Args:
        tools: those that may be called, at least one.
        form: how the model writes calls.
        several: whether further calls may follow, ``MAX_CALLS`` in all.
        thinks: whether reasoning may come before.
        thinking: whether the prompt has begun the reasoning.
    """
    calls = f"call ({_text(_BETWEEN[form])} call){{0,{MAX_CALLS - 1}}}" if several else "call"
    before = f"{'rest' if thinking else 'think?'} " if thinks else ""
    rules = [f"start: {before}{calls}"]
    if thinks:
        rules += [
            f"think: {_text(reasoning.OPEN)} rest",
            r"rest: reason /\n*/",
            rf"reason[lazy]: /(.|\n)*{reasoning.CLOSE.replace('/', chr(92) + '/')}/",
        ]
    functions = " | ".join(f"function{index}" for index in range(len(tools)))
    rules.append(f"call: {_text(_BEFORE[form])} ({functions}) {_text(_BEHIND[form])}")
    # Each schema is a root of its own, so that its references stay what they are. Tools may share one.
    schemas: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = json.dumps(tool.function.name, ensure_ascii=False)
        number = schemas.setdefault(json.dumps(_schema(tool)), len(schemas))
        head = f'{{"name": {name}, "{_ARGUMENTS[form]}": '
        rules.append(f'function{index}: {_text(head)} arguments{number} "}}"')
    rules += [f"arguments{number}: %json {schema}" for schema, number in schemas.items()]
    return "\n".join(rules)


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object in any case."""
    given = tool.function.parameters
    schema = {"type": "object", **given} if isinstance(given, dict) else {"type": "object"}
    return {"x-guidance": {"whitespace_pattern": JSON_SPACE}, **bounded(schema)}


def _text(text: str) -> str:
    """Return a text as a literal of Lark's notation."""
    return json.dumps(text)
