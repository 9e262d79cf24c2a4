"""Instructor over OpenAI's client: structured output by tools, by a schema, and by JSON alone.

    python instructor_client.py URL MODEL KEY tools|json_schema|json

With tools and json_schema the server guides the output, so any model will do. With json it only makes sure
that the reply is an object: the model has to say what it is told.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL, MODEL, KEY, NAME = sys.argv[1:5]
MODES = {
    "tools": instructor.Mode.TOOLS,
    "json_schema": instructor.Mode.JSON_SCHEMA,
    "json": instructor.Mode.JSON,
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Köln", "Rome"]
    degrees: Literal[3, 21]
    rains: bool


openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
client = instructor.from_openai(openai, mode=MODES[NAME])
asked: dict[str, Any] = {
    "model": MODEL,
    "response_model": Weather,
    "messages": [{"role": "user", "content": "It rains in Rome, at 21 degrees."}],
    "max_retries": 0,
    "max_tokens": 200,
}
if NAME == "json":
    said = '{"city": "Rome", "degrees": 21, "rains": true}'
    asked["extra_body"] = {"chat_template_kwargs": {"reply": said}}
found, reply = client.chat.completions.create_with_completion(**asked)
assert isinstance(found, Weather), found
assert reply.choices[0].finish_reason == ("tool_calls" if NAME == "tools" else "stop")
if NAME == "json":
    assert found.model_dump() == {"city": "Rome", "degrees": 21, "rains": True}
*parts, last = client.chat.completions.create_partial(**asked)
assert parts and Weather.model_validate(last.model_dump()).city in ("Köln", "Rome")
print("all done")
