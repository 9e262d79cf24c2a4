"""LangChain's `bind_tools` against a server whose model says what it is told: python … URL MODEL KEY."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL, KEY = sys.argv[1:4]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
REPLY = f"A moment.\n{CALL % 'Köln'}\n{CALL % 'Rome'}"
ARGUMENTS = [{"city": "Köln"}, {"city": "Rome"}]
ASK = HumanMessage("Is it raining?")


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


def bound(**template: Any) -> Any:
    model = ChatOpenAI(
        base_url=f"{URL}/v1",
        model=MODEL,
        api_key=KEY,
        max_retries=0,
        extra_body={"chat_template_kwargs": template},
    )
    return model.bind_tools([weather], tool_choice="auto", parallel_tool_calls=True)


whole = bound(reply=REPLY).invoke([ASK])
assert whole.content == "A moment." and whole.response_metadata["finish_reason"] == "tool_calls"
assert [call["args"] for call in whole.tool_calls] == ARGUMENTS and not whole.invalid_tool_calls
streamed: AIMessageChunk | None = None
for chunk in bound(reply=REPLY).stream([ASK]):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed is not None and streamed.content == whole.content
assert [call["args"] for call in streamed.tool_calls] == ARGUMENTS
assert [call["name"] for call in streamed.tool_calls] == ["weather"] * 2
results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in whole.tool_calls]
answer = bound(reply="It rains.").invoke([ASK, whole, *results])
assert answer.content == "It rains." and not answer.tool_calls
print("all done")
