"""LangChain's chat model and language model of OpenAI's API against a server: python … URL MODEL KEY."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langchain_openai import OpenAI as CompletionOpenAI

URL, MODEL, KEY = sys.argv[1:4]
OPTIONS: dict[str, Any] = {"base_url": f"{URL}/v1", "model": MODEL, "api_key": KEY, "max_retries": 0}
MESSAGES = [SystemMessage("Answer in one word."), HumanMessage("What is the capital of France?")]


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


async def chat() -> None:
    model = ChatOpenAI(**OPTIONS, temperature=0, max_tokens=12)
    whole = model.invoke(MESSAGES)
    assert whole.content and whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    streamed = joined(list(model.stream(MESSAGES, stream_usage=True)))
    assert streamed.content == whole.content and streamed.usage_metadata is not None
    for name in ("input_tokens", "output_tokens", "total_tokens"):  # how much was cached differs
        assert streamed.usage_metadata[name] == whole.usage_metadata[name]
    later = joined([chunk async for chunk in model.astream(MESSAGES)])
    assert later.content == whole.content == (await model.ainvoke(MESSAGES)).content
    assert [each.content for each in model.batch([MESSAGES] * 4)] == [whole.content] * 4
    turn = [*MESSAGES, whole, HumanMessage("Why?")]
    assert model.invoke(turn).usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]


def sampling() -> None:
    model = ChatOpenAI(
        **OPTIONS, temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.1, frequency_penalty=0.1, n=1
    )
    bound = model.bind(logprobs=True, top_logprobs=2, stop=["\n\n"], max_tokens=12)
    first, second = bound.invoke(MESSAGES), bound.invoke(MESSAGES)
    assert first.content == second.content
    assert all(len(each["top_logprobs"]) == 2 for each in first.response_metadata["logprobs"]["content"])
    extra = ChatOpenAI(**OPTIONS, max_tokens=12, extra_body={"top_k": 5, "min_p": 0.05})
    assert extra.invoke(MESSAGES).content is not None


async def completions() -> None:
    model = CompletionOpenAI(**OPTIONS, temperature=0, max_tokens=12)
    whole = model.invoke("Once upon a time")
    assert whole and "".join(model.stream("Once upon a time")) == whole
    assert "".join([part async for part in model.astream("Once upon a time")]) == whole
    prompts = ["Once upon a time", "One two three"]
    result = model.generate(prompts)
    assert result.generations[0][0].text == whole
    assert result.llm_output is not None and result.llm_output["token_usage"]["completion_tokens"] == 24
    assert len(await model.abatch(prompts)) == 2


def errors() -> None:
    for kind, changes in (
        (openai.AuthenticationError, {"api_key": "another"}),
        (openai.NotFoundError, {"model": "another"}),
        (openai.BadRequestError, {"temperature": 3.0}),
    ):
        try:
            ChatOpenAI(**{**OPTIONS, **changes}).invoke(MESSAGES)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


asyncio.run(chat())
sampling()
asyncio.run(completions())
errors()
print("all done")
