"""The renderers package's `generate` under many streams.

    python renderers_client.py URL MODEL DIRECTORY STREAMS

Ids and log-probabilities are compared with those of the native route, asked for one after the other.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import transformers
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import OverlongPromptError, generate

URL, MODEL, DIRECTORY = sys.argv[1:4]
STREAMS = int(sys.argv[4])
TOKENS = 24
PARAMS: dict[str, Any] = {"temperature": 0.8, "max_tokens": TOKENS, "top_p": 0.95, "top_k": 50}

tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
renderer = create_renderer(tokenizer)


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell story number {number} of a river and a small stone house."}]


async def one(client: AsyncOpenAI, number: int) -> dict[str, Any]:
    return await generate(
        client=client,
        renderer=renderer,
        messages=messages(number),
        model=MODEL,
        sampling_params={**PARAMS, "seed": number},
    )


def native(http: httpx.Client, reply: dict[str, Any], number: int) -> tuple[list[int], list[float]]:
    """What the native route gives for the same prompt and options."""
    params = {
        **{name: value for name, value in PARAMS.items() if name != "max_tokens"},
        "max_new_tokens": TOKENS,
        "sampling_seed": number,
        "stop_token_ids": renderer.get_stop_token_ids(),
        "skip_special_tokens": False,
    }
    body = {"input_ids": reply["prompt_ids"], "sampling_params": params, "return_logprob": True}
    answer = http.post(f"{URL}/generate", json=body)
    answer.raise_for_status()
    found = answer.json()
    return found["output_ids"], [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=100) as client:
        replies = await asyncio.gather(*(one(client, number) for number in range(STREAMS)))
        try:
            await generate(
                client=client, renderer=renderer, messages=[], model=MODEL, prompt_ids=[5] * 100_000
            )
        except OverlongPromptError:
            pass
        else:
            raise AssertionError("a prompt beyond max_model_len was sent")
    with httpx.Client(timeout=60) as http:
        for number, reply in enumerate(replies):
            ids, logprobs = native(http, reply, number)
            assert reply["completion_ids"] == ids and len(ids) > 0, (number, reply["completion_ids"], ids)
            assert reply["completion_logprobs"] == logprobs, number  # to the bit
            assert reply["finish_reason"] in ("stop", "length") and reply["request_id"]
    assert len({tuple(reply["completion_ids"]) for reply in replies}) > STREAMS // 2
    print("all done")


asyncio.run(main())
