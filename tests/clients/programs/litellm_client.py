"""LiteLLM against a server, as an OpenAI API and as a hosted vLLM: python litellm_client.py URL MODEL KEY."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched from the network

import litellm

URL, MODEL, KEY = sys.argv[1:4]
MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def options(kind: str, **changes: Any) -> dict[str, Any]:
    at = {"model": f"{kind}/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
    return {**at, "temperature": 0, "max_tokens": 12, **changes}


async def chat(kind: str) -> None:
    whole = litellm.completion(messages=MESSAGES, **options(kind))
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=MESSAGES, **options(kind, **usage)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)][-1] > 0
    stream = await litellm.acompletion(messages=MESSAGES, **options(kind, stream=True))
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text
    assert (await litellm.acompletion(messages=MESSAGES, **options(kind))).choices[0].message.content == text
    logprobs = litellm.completion(messages=MESSAGES, **options(kind, logprobs=True, top_logprobs=2))
    assert logprobs.choices[0].logprobs.content
    sampled = options(
        kind, temperature=0.9, top_p=0.9, seed=5, presence_penalty=0.1, stop=["\n\n"], user="me"
    )
    first, second = (litellm.completion(messages=MESSAGES, **sampled) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content


def completions() -> None:
    kind = "text-completion-openai"
    whole = litellm.text_completion(prompt="Once upon a time", **options(kind))
    chunks = litellm.text_completion(prompt="Once upon a time", **options(kind, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text != ""


def errors(kind: str) -> None:
    for expected, changes in (
        (litellm.AuthenticationError, {"api_key": "another"}),
        (litellm.NotFoundError, {"model": f"{kind}/another"}),
        (litellm.BadRequestError, {"temperature": 3}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 20_000}]}),
    ):
        try:
            litellm.completion(**{**options(kind), "messages": MESSAGES, **changes})
        except expected:
            continue
        raise AssertionError(f"no {expected.__name__} from {kind}")


for each in ("openai", "hosted_vllm"):
    asyncio.run(chat(each))
    errors(each)
completions()
print("all done")
