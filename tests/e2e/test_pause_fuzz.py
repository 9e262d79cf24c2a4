"""Random calls over HTTP: every request ends exactly once, and the engine returns to its first state."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.fuzz import MAX_TOKENS, Fuzz
from tests.e2e.served import Client, greedy, serve
from tests.support.sensitive_model import write_sensitive_model

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "A list of animals:",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "The quick brown fox jumps over the lazy dog. " * 12,  # several chunks, half of them shared
    "Seven grey geese and one swan crossed the wide river at dawn. " * 8,
]
# Less KV than five requests may need: some wait although slots are free, and some are preempted.
OPTIONS = ("--dtype", "float32", "--num-kv-tokens", "192", "--page-size", "4")
WANTED = ("length", "abort", "disconnected", "flush 200", "flush 400", "pause retract", "pause abort")
LIMITS = ("--max-running-requests", "5", "--chunked-prefill-size", "32")


def fuzz(seconds: float, directory: Path, seed: int, *options: str) -> None:
    log = directory / "log"
    with (
        log.open("w") as file,
        serve(*OPTIONS, *LIMITS, *options, log=file) as served,
        closing(Client(served)) as client,
    ):
        start = client.state()
        replies = client.generate(PROMPTS, greedy(MAX_TOKENS))
        whole = {text: reply["output_ids"] for text, reply in zip(PROMPTS, replies, strict=True)}
        fuzzed = Fuzz(served.url, whole, seed)
        fuzzed.run(seconds, WANTED)
        client.until(running_batch_size=0, waiting_queue_size=0, req_to_token_pool_used=0)
        assert client.flush(timeout=5).status_code == 200
        end = client.state()
        print(f"{seconds:g} s, {end['num_preemptions']} preemptions: {dict(sorted(fuzzed.counts.items()))}")
        totals = (
            *("num_generated_tokens", "num_steps", "num_preemptions", "num_flushes", "eager"),
            "last_gen_throughput",
        )
        assert {name: end[name] for name in end if name not in totals} == {
            name: start[name] for name in start if name not in totals
        }
        assert client.generate(PROMPTS[0], greedy(MAX_TOKENS))["output_ids"] == whole[PROMPTS[0]]
    assert log.read_text() == "", "the server must log no warning"
    for kind in WANTED:
        assert fuzzed.counts[kind], f"no {kind!r} occurred"


def test_random_calls_for_three_seconds(tmp_path: Path) -> None:
    model = write_sensitive_model(tmp_path / "sensitive-model")
    fuzz(3, tmp_path, 1, "--model", str(model))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_calls_for_five_minutes(tmp_path: Path) -> None:
    fuzz(300, tmp_path, seed=2)
