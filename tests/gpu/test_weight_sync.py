"""Weights sent by `WeightSender` to a server on CUDA over NCCL."""

import copy
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from segue.trainer import WeightSender, WeightSendError
from tests.e2e.served import greedy, serve
from tests.model_runner import making, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(240),
]
OPTIONS = ("--device", "cuda", "--dtype", "bfloat16", "--num-kv-tokens", "2048")
DEVICE = torch.device("cuda", max(torch.cuda.device_count() - 1, 0))  # of the trainer
SAVE: dict[str, Any] = {
    "llama-tied": lambda path: tiny.save_llama(path, tie_word_embeddings=True),
    "qwen3": tiny.save_qwen3,
    "qwen3-moe": tiny.save_qwen3_moe,
}


def replies(url: str) -> list[Any]:
    """Returns greedy tokens and their logprobs, per prompt."""
    found = []
    for seed in range(4):
        body = {"input_ids": making.prompt(9 + seed, seed=seed), "sampling_params": greedy(16)}
        reply = httpx.post(f"{url}/generate", json=body | {"return_logprob": True}, timeout=60).json()
        found.append((reply["output_ids"], [each[0] for each in reply["meta_info"]["output_token_logprobs"]]))
    return found


def total(url: str) -> int:
    return int(httpx.get(f"{url}/weights_checker", timeout=60).json()["total"])


def checkpoint(kind: str, path: Path, factor: float) -> Any:
    """Save a model with all parameters times ``factor`` to ``path``, and return it."""
    model = SAVE[kind](path)
    for parameter in model.parameters():
        parameter.mul_(factor)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", SAVE)
def test_an_updated_server_answers_like_one_started_with_the_new_weights(kind: str, tmp_path: Path) -> None:
    old, new = (checkpoint(kind, tmp_path / name, factor) for name, factor in (("old", 1.0), ("new", 1.25)))
    with serve("--model", str(tmp_path / "new"), *OPTIONS) as fresh:
        expected, checksum = replies(fresh.url), total(fresh.url)
    with serve("--model", str(tmp_path / "old"), *OPTIONS) as served:
        before, old_checksum = replies(served.url), total(served.url)
        assert before != expected
        for flattened, checksums, dtype in itertools.product(
            (True, False), (True, False), (torch.bfloat16, torch.float32)
        ):
            for model, their_sum, expected_replies in (
                (new, checksum, expected),
                (old, old_checksum, before),
            ):
                weights = copy.deepcopy(model).to(DEVICE, dtype)
                with WeightSender(
                    [served.url], weights, flattened=flattened, checksums=checksums, buffer_size_mb=0.05
                ) as sender:
                    assert sender.send().num_buckets > 2
                    sender.send()
                assert total(served.url) == their_sum
                assert replies(served.url) == expected_replies


def test_values_that_are_not_finite_are_refused_and_the_old_weights_stay(tmp_path: Path) -> None:
    model = checkpoint("qwen3", tmp_path, 1.0).to(DEVICE, torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight[5, 7] = float("nan")
    with serve("--model", str(tmp_path), *OPTIONS) as served:
        before = total(served.url)
        for flattened in (True, False):
            message = r"'model\.layers\.1\.mlp\.up_proj\.weight' has values"
            with (
                WeightSender([served.url], model, flattened=flattened) as sender,
                pytest.raises(WeightSendError, match=message),
            ):
                sender.send()
        assert total(served.url) == before
