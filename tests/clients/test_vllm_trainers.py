"""The calls of trainers that speak to vLLM, in their order: prime-rl's control, SkyRL's token generation.

Neither is a package that can be installed, so each call has the file and line of its source beside it:
prime-rl at 559b4477 and SkyRL at a9564572.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.served import Client, serve
from tests.e2e.syncing import write_checkpoints
from tests.support.streams import ReplyGroup, ReplyInParts
from tests.support.tiny_model import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "policy"
OPTIONS = (
    *("--dtype", "float32", "--deterministic", "--served-model-name", NAME),
    *("--num-kv-tokens", "32768", "--max-running-requests", "64"),
)
GENERATE = "/inference/v1/generate"
NUM_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Policy:
    """A server, and the checkpoints of a policy."""

    client: Client
    checkpoints: list[Path]

    def post(self, path: str, **fields: Any) -> Any:
        response = self.client.http.post(path, **fields)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json() if response.content else None


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    vocab_size = (tokenizer := make_tokenizer()).get_vocab_size(with_added_tokens=True)
    checkpoints = write_checkpoints(
        tmp_path_factory.mktemp("policy"), kind="qwen3", count=2, vocab_size=vocab_size
    )
    tokenizer.save(str(checkpoints[0] / "tokenizer.json"))
    with serve("--model", str(checkpoints[0]), *OPTIONS) as served:
        client = Client(served)
        yield Policy(client, checkpoints)
        client.close()


def ids_of(reply: ReplyInParts) -> list[int]:
    """The tokens that have come so far."""
    return [token for _, event in list(reply.events) for c in event["choices"] for token in c["token_ids"]]


def streams(version: str, count: int = 64) -> list[tuple[str, dict[str, Any]]]:
    """Rollouts of one version of the policy. Their prefixes are shared within a version only."""
    params = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
    return [
        (
            GENERATE,
            {
                "model": NAME,
                "token_ids": [5, 6, 7, index],
                "sampling_params": params | {"seed": index},
                "cache_salt": version,
                "stream": True,
            },
        )
        for index in range(count)
    ]


def test_prime_rl_updates_a_policy_under_64_streams(policy: Policy) -> None:
    client, url = policy.client, policy.client.served.url
    old = ReplyGroup.send(url, streams("0")).end()
    # src/prime_rl/utils/client.py
    assert client.http.get("/health").status_code == 200  # line 184
    assert [card["id"] for card in client.http.get("/v1/models").json()["data"]] == [NAME]  # line 166
    policy.post("/pause", params={"mode": "keep"})  # so that all of them begin together
    running = ReplyGroup.send(url, streams("0"))
    client.until(waiting_queue_size=64)
    policy.post("/resume")
    client.until_more(client.state()["num_generated_tokens"] + 64)
    had = [ids_of(reply) for reply in running.replies]
    policy.post("/pause", params={"mode": "keep", "clear_cache": "false"})  # line 258
    paused = client.state()
    weights = policy.checkpoints[1]
    (weights / "NCCL_READY").touch()  # line 305: a file that is no part of the checkpoint
    policy.post("/update_weights", json={"weight_dir": weights.as_posix()})  # line 312
    after = client.state()
    assert (after["running_batch_size"] + after["waiting_queue_size"]) == 64
    assert after["num_generated_tokens"] == paused["num_generated_tokens"]
    policy.post("/resume")  # line 270
    replies = running.end()
    assert [reply["finish"] for reply in replies] == ["length"] * 64
    assert {len(reply[name]) for reply in replies for name in ("ids", "logprobs")} == {NUM_TOKENS}
    for reply, content, before in zip(replies, old, had, strict=True):
        assert reply["ids"][: len(before)] == content["ids"][: len(before)]
        assert reply["logprobs"][: len(before)] == content["logprobs"][: len(before)]
    differ = sum(reply["ids"] != content["ids"] for reply, content in zip(replies, old, strict=True))
    assert differ > 32 and any(had), "the streams did not go on with the new weights"

    new = ReplyGroup.send(url, streams("1")).end()
    policy.post("/update_weights_from_disk", json={"model_path": str(weights), "flush_cache": True})
    assert new == ReplyGroup.send(url, streams("2")).end(), "KV of the old weights was used"


def skyrl_params(**others: Any) -> dict[str, Any]:
    """The sampling parameters that SkyRL sends.

    They are those of line 55 of skyrl/backends/skyrl_train/inference_servers/engine_utils.py.
    """
    fixed = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True}
    sampled = {"max_tokens": 48, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
    return fixed | sampled | {"stop": None} | others


def native(policy: Policy, prompt: list[int], seed: int) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and finish reason by the native API."""
    params = {"max_new_tokens": 48, "min_new_tokens": 1, "temperature": 1.0, "sampling_seed": seed}
    reply = policy.client.generate(None, params, input_ids=prompt, return_logprob=True)
    entries = reply["meta_info"]["output_token_logprobs"]
    reason = reply["meta_info"]["finish_reason"]["type"]
    return reply["output_ids"], [logprob for logprob, _, _ in entries], reason


def test_skyrl_generates_tokens_across_pauses(policy: Policy) -> None:
    # skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py
    client = policy.client
    size = client.http.request("GET", "/get_world_size", json={}).json()  # line 1377
    assert size["world_size"] == 1
    prompts = [[5, 6, 7, index, 9] for index in range(32)]
    expected = [native(policy, prompt, index) for index, prompt in enumerate(prompts)]
    policy.post("/reset_prefix_cache", json={"reset_running_requests": False})  # line 1099

    def generate(index: int) -> tuple[list[int], list[float], str]:
        body = {"sampling_params": skyrl_params(seed=index), "model": NAME, "token_ids": prompts[index]}
        reply = policy.post(GENERATE, json=body, headers={"X-Session-ID": str(index)})  # line 507
        (choice,) = reply["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return choice["token_ids"], logprobs, choice["finish_reason"]

    futures = [client.run(lambda index=index: generate(index)) for index in range(len(prompts))]
    for _ in range(3):
        before = client.state()["num_generated_tokens"]
        policy.post("/pause", params={"mode": "keep", "clear_cache": "false"})  # line 1009
        policy.post("/resume")  # line 1013
        if client.state()["running_batch_size"]:
            client.until_more(before)
    assert [future.result(60) for future in futures] == expected

    ids = expected[0][0]
    text = policy.post("/detokenize", json={"model": NAME, "tokens": ids})["prompt"]  # line 889
    again = {"model": NAME, "prompt": text, "add_special_tokens": False}
    assert policy.post("/tokenize", json=again)["tokens"]  # line 857
    assert policy.post("/detokenize", json={"model": NAME, "tokens": ids})["prompt"] == text


def test_skyrl_scores_a_prompt_with_its_sample(policy: Policy) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    # remote_inference_client.py, lines 662 to 673; `output_kind` 2 asks for the end only
    params = {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0}
    params |= {"max_tokens": 48, "temperature": 1.0, "seed": 3, "top_k": -1, "top_p": 1.0}
    body = {"sampling_params": params, "model": NAME, "token_ids": prompt}
    reply = policy.post(GENERATE, json=body)  # line 689
    scores = policy.client.generate(
        None, {"max_new_tokens": 1}, input_ids=prompt, return_logprob=True, logprob_start_len=0
    )["meta_info"]["input_token_logprobs"]
    found = [
        entry and entry[str(t)]["logprob"] for t, entry in zip(prompt, reply["prompt_logprobs"], strict=True)
    ]
    assert found == [logprob for logprob, _, _ in scores] and found[0] is None
    (choice,) = reply["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert (choice["token_ids"], logprobs, choice["finish_reason"]) == native(policy, prompt, 3)
