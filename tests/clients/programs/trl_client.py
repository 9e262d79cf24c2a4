"""TRL's client of vLLM's server against a server of ours: python trl_client.py URL DIRECTORY.

The server serves what is in DIRECTORY, in float32. Everything is compared with transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from trl.generation.vllm_client import VLLMClient

URL, DIRECTORY = sys.argv[1:3]
TOLERANCE, TOP = 1e-3, 100
PROMPTS = ["The river ran past a small stone house", "She opened the window"]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]

tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


@torch.inference_mode()
def logprobs(ids: list[int]) -> torch.Tensor:
    """The log-probabilities of the token behind each of these."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)


def check_reply(reply: dict[str, Any], prompts: list[list[int]], count: int, tops: int) -> None:
    assert reply["prompt_ids"] == prompts
    for prompt, ids, found, tokens in zip(
        prompts, reply["completion_ids"], reply["logprobs"], reply["logprob_token_ids"], strict=True
    ):
        assert len(ids) == len(found) == len(tokens) == count
        expected = logprobs(prompt + ids)[len(prompt) - 1 : -1]
        for token, row, candidates, values in zip(ids, expected, tokens, found, strict=True):
            assert token in candidates and len(candidates) in (max(tops, 1), tops + 1)
            assert token == int(row.argmax())
            for candidate, value in zip(candidates, values, strict=True):
                assert abs(float(row[candidate]) - value) <= TOLERANCE, (candidate, value)


def check_generate(client: VLLMClient) -> None:
    ids = tokenizer(PROMPTS)["input_ids"]
    for tops in (0, TOP):
        options = {"temperature": 0.0, "max_tokens": 12, "logprobs": tops}
        extra = {"generation_kwargs": {"ignore_eos": True}}
        check_reply(client.generate(PROMPTS, **options, **extra), ids, 12, tops)
        check_reply(client.generate(ids, **options, **extra), ids, 12, tops)
    plain = client.generate(PROMPTS, temperature=1.0, max_tokens=4, logprobs=None)
    assert plain["logprobs"] is None and [len(each) <= 4 for each in plain["completion_ids"]] == [True] * 2
    sampled = client.generate(PROMPTS, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, max_tokens=4)
    assert len(sampled["logprobs"][0][0]) == 1


def check_chat(client: VLLMClient) -> None:
    ids = tokenizer.apply_chat_template(CHATS, add_generation_prompt=True, return_dict=False)
    for tops in (0, TOP):
        options = {"temperature": 0.0, "max_tokens": 12, "logprobs": tops}
        reply = client.chat(CHATS, **options, generation_kwargs={"ignore_eos": True})
        check_reply(reply, ids, 12, tops)


def check_scores(client: VLLMClient) -> None:
    texts = [f"{text} and it was a very long evening in the garden" for text in PROMPTS]
    sequences = tokenizer(texts)["input_ids"]
    lengths = [3, 5]
    for chunk in (0, 1):
        found = client.get_sequence_logprobs(sequences, lengths, top_logprobs=TOP, chunk_size=chunk)
        for number, (ids, length) in enumerate(zip(sequences, lengths, strict=True)):
            expected = logprobs(ids)[length - 1 : -1]
            best = expected.topk(TOP)
            ours = torch.tensor(found["logprobs"][number], dtype=torch.double)
            assert ours.shape == (len(ids) - length, TOP)
            assert (ours - best.values).abs().max() <= TOLERANCE
            tokens = torch.tensor(found["logprob_token_ids"][number])
            assert (expected.gather(1, tokens) - ours).abs().max() <= TOLERANCE
            actual = torch.tensor(found["actual_logprobs"][number], dtype=torch.double)[:, 0]
            theirs = expected.gather(1, torch.tensor(ids[length:])[:, None])[:, 0]
            assert (actual - theirs).abs().max() <= TOLERANCE


def main() -> None:
    client = VLLMClient(base_url=URL)
    assert client.get_world_size() == 1
    check_generate(client)
    check_chat(client)
    check_scores(client)
    client.reset_prefix_cache()
    check_scores(client)
    print("all done")


main()
