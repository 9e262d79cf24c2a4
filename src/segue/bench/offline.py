"""The speed of an engine without a server: batches of random prompts, and how fast they are done."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from segue.bench.load import Lengths
from segue.errors import BenchmarkError

if TYPE_CHECKING:
    from segue.api.engine import Engine

POLL_S = 0.2  # between two looks at how many tokens there are
WARM_UP = (4, 32, 8)  # requests, prompt tokens, output tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that an engine gets all at once."""

    prompts: list[list[int]]
    max_tokens: list[int]  # the exact number of output tokens of each request
    temperature: float

    @classmethod
    def draw(cls, count: int, lengths: Lengths, *, temperature: float, seed: int) -> Batch:
        """Draw `count` requests; another seed gives other prompts, so that no cache knows them."""
        rng = random.Random(seed)
        jobs = [lengths.job(rng) for _ in range(count)]
        return cls(
            prompts=[list(job.prompt) for job in jobs],  # type: ignore[arg-type]
            max_tokens=[job.max_tokens for job in jobs],
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What one batch took."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float

    def rates(self) -> dict[str, float]:
        """Return requests and tokens per second."""
        return {
            "requests/s": self.requests / self.seconds,
            "prompt tokens/s": self.prompt_tokens / self.seconds,
            "output tokens/s": self.output_tokens / self.seconds,
            "tokens/s": (self.prompt_tokens + self.output_tokens) / self.seconds,
        }


def generate(engine: Engine, batch: Batch) -> list[dict[str, Any]]:
    """Run a batch with EOS ignored; returns the replies in the order of the prompts."""
    params = [
        {"temperature": batch.temperature, "max_new_tokens": count, "ignore_eos": True, "sampling_seed": seed}
        for seed, count in enumerate(batch.max_tokens)
    ]
    replies: list[dict[str, Any]] = engine.generate(input_ids=batch.prompts, sampling_params=params)
    return replies


def measure(engine: Engine, batch: Batch, progress: Callable[[int], object] | None = None) -> OfflineRun:
    """Run a batch and time it.

    `progress` gets the number of output tokens so far, every `POLL_S` seconds and at the end. The engine is
    not asked for it: it is what the last step has reported anyway.

    Raises:
        BenchmarkError: a request has another number of tokens than was asked for.
    """
    before, done = output_tokens(engine), threading.Event()

    def report() -> None:
        while progress is not None and not done.wait(POLL_S):
            progress(output_tokens(engine) - before)

    reporter = threading.Thread(target=report, name="segue-bench-progress")
    reporter.start()
    try:
        begun = time.perf_counter()
        replies = generate(engine, batch)
        seconds = time.perf_counter() - begun
    finally:
        done.set()
        reporter.join()
    made = [len(reply["output_ids"]) for reply in replies]
    if made != batch.max_tokens:
        raise BenchmarkError(
            f"the engine made {sum(made)} tokens where {sum(batch.max_tokens)} were asked for; lower the "
            "lengths, so that each request fits --max-model-len"
        )
    if progress is not None:
        progress(sum(made))
    return OfflineRun(
        requests=len(made),
        prompt_tokens=sum(map(len, batch.prompts)),
        output_tokens=sum(made),
        seconds=seconds,
    )


def output_tokens(engine: Engine) -> int:
    """Return the tokens that the engine has made since its start, as of its last step."""
    return engine._runtime.manager.stats.counters.output_tokens


def vocab_size(engine: Engine) -> int:
    """Return the number of token ids of the engine's model."""
    return engine._runtime.manager.ready.vocab_size


def warm_up(engine: Engine, lengths: Lengths) -> None:
    """Run a few short requests, so that nothing is done for the first time when it is measured."""
    count, prompt, output = WARM_UP
    short = replace(
        lengths,
        prompt=(min(prompt, lengths.prompt[0]),) * 2,
        output=(min(output, lengths.output[0]),) * 2,
    )
    generate(engine, Batch.draw(count, short, temperature=0.0, seed=-1))


def summary(runs: Sequence[OfflineRun]) -> dict[str, Any]:
    """Return the medians of the runs' rates, and what each run took."""
    rates = [run.rates() for run in runs]
    return {
        **{name: statistics.median(each[name] for each in rates) for name in rates[0]},
        "runs": [asdict(run) for run in runs],
    }
