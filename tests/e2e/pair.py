"""A prefill engine, a decode engine, and one that does both, whose replies are compared."""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import segue

PAGE_SIZE = 4
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "page_size": PAGE_SIZE,
    "num_kv_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 24,
    "log_level": "error",
}
ROOMS = itertools.count(1)


class Pair:
    """A prefill engine, a decode engine, and one that does both, all with the same options."""

    def __init__(
        self,
        model: Path,
        tp: tuple[int, int] = (1, 1),
        gpus: tuple[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Start the engines, ``tp`` ranks each; ``gpus`` are the two engines' CUDA_VISIBLE_DEVICES."""
        options = OPTIONS | {"model": str(model)} | options
        self.model = model.name
        self.whole = segue.Engine(**options, embedded=True)
        ranks = [{"tp": count, "embedded": count == 1 and gpus is None} for count in tp]
        with pytest.MonkeyPatch.context() as patch:
            if gpus is not None:
                patch.setenv("CUDA_VISIBLE_DEVICES", gpus[0])
            options |= {"disaggregation_bootstrap_port": 0}
            self.prefill = segue.Engine(role="prefill", **options, **ranks[0])
            if gpus is not None:
                patch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
            self.decode = segue.Engine(role="decode", **options, **ranks[1])
        address = self.prefill.get_server_info()["decided"]["control_address"]
        self.host, port = address.rsplit(":", 1)
        self.port = int(port)
        self.threads = ThreadPoolExecutor(64)

    def where(self, count: int | None = None) -> dict[str, Any]:
        """Returns the bootstrap fields of a call, or of a batch of ``count`` prompts, for both engines."""
        rooms = next(ROOMS) if count is None else [next(ROOMS) for _ in range(count)]
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": rooms}

    def split(self, **call: Any) -> tuple[Any, Any]:
        """Returns the replies of the prefill and of the decode engine."""
        prompts = call.get("input_ids") or call["prompt"]
        is_batch = isinstance(prompts, list) and not isinstance(prompts[0], int)
        call |= self.where(len(prompts) if is_batch else None)
        first: Future[Any] = self.threads.submit(self.prefill.generate, **call)
        second: Future[Any] = self.threads.submit(self.decode.generate, **call)
        return first.result(60), second.result(60)

    def handover(self, engine: segue.Engine) -> dict[str, Any]:
        found: dict[str, Any] = engine.get_server_info()["internal_states"][0]["handover"]
        return found

    def compare(self, **call: Any) -> Any:
        """Asserts that the pair replies what one engine replies, and recomputes nothing."""
        call = {"return_logprob": True} | call  # ids alone hardly depend on the KV of a random model
        before = self.handover(self.decode)
        whole, (_, decoded) = self.whole.generate(**call), self.split(**call)
        count = 1
        for one, two in zip(*[r if isinstance(r, list) else [r] for r in (whole, decoded)], strict=True):
            assert (two["output_ids"], two["text"]) == (one["output_ids"], one["text"])
            names = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs")
            for name in (*names, "output_top_logprobs", "input_token_logprobs", "weight_versions"):
                assert two["meta_info"].get(name) == one["meta_info"].get(name), name
            count = len(whole) if isinstance(whole, list) else 1
        after = self.handover(self.decode)
        assert after["recomputed"] == before["recomputed"] == {} and after["failed"] == {}
        self.num_adopted = after["num_adopted"] - before["num_adopted"]
        assert self.num_adopted <= count
        return decoded

    def close(self) -> None:
        for engine in (self.whole, self.prefill, self.decode):
            engine.shutdown()
        self.threads.shutdown()


def ids(count: int, seed: int = 0) -> list[int]:
    return [(7 + 13 * seed + 31 * index * (seed + 1)) % 300 + 3 for index in range(count)]


def greedy(count: int = 12, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} | more
