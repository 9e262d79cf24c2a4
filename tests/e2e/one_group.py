"""An engine of one rank and an engine of two, in one group with a trainer: four ranks, on any devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.served import Served, greedy, serve
from tests.e2e.syncing import PROMPTS
from tests.support.child import start_child


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where the ranks are, and how they run."""

    options: Sequence[str]  # of both engines
    trainer: str  # its device
    buffer_mb: float  # of a bucket
    deadline_s: float  # of each wait of the sender and of the engines
    everywhere: Mapping[str, str] = field(default_factory=dict)  # environment of all processes
    single: Mapping[str, str] = field(default_factory=dict)  # environment of the engine of one rank, besides


def check_updates(old: Path, new: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """Assert that engines which get weights are as engines which start with them, and return what was sent.

    Flattened buckets bring the new weights to engines with old ones, and one broadcast per tensor brings the
    old ones back.
    """
    with _engines(new, ranks) as fresh:
        right = [_seen(engine) for engine in fresh]
    with _trainer(ranks) as trainer, _engines(old, ranks) as engines:
        before = [_seen(engine) for engine in engines]
        for (old_sum, old_replies), (new_sum, new_replies) in zip(before, right, strict=True):
            assert old_sum != new_sum
            assert [ids for ids, _ in old_replies] != [ids for ids, _ in new_replies]
        assert right[0][0] == right[1][0], "a checksum does not depend on the number of ranks"
        sent = []
        for checkpoint, flattened, expected in ((new, True, right), (old, False, before)):
            report = _send(
                trainer,
                model=str(checkpoint),
                endpoints=[engine.url for engine in engines],
                flattened=flattened,
                buffer_size_mb=ranks.buffer_mb,
                timeout_s=ranks.deadline_s,
            )
            assert report["world_size"] == 4
            assert report["num_buckets"] > 2
            assert [_seen(engine) for engine in engines] == expected, report
            sent.append(report)
    return sent


@contextmanager
def _engines(model: Path, ranks: Ranks) -> Iterator[list[Served]]:
    """An engine of one rank and one of two, which start at the same time."""
    given = ("--model", str(model), *ranks.options)
    starting = [
        serve(*given, environment={**ranks.everywhere, **ranks.single}),
        serve(*given, "--tp", "2", environment=ranks.everywhere),
    ]
    with ExitStack() as stack, ThreadPoolExecutor(len(starting)) as threads:
        starts = [threads.submit(stack.enter_context, each) for each in starting]
        yield [start.result() for start in starts]


def _seen(engine: Served) -> tuple[int, list[Any]]:
    """The checksum of an engine's weights, and its greedy tokens and their logprobs per prompt."""
    replies = []
    for prompt in PROMPTS:  # one at a time: bits may depend on the batch
        body = {"input_ids": prompt, "sampling_params": greedy(12), "return_logprob": True}
        reply = engine.post("/generate", body).json()
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        replies.append((reply["output_ids"], logprobs))
    return engine.get("/weights_checker").json()["total"], replies


@contextmanager
def _trainer(ranks: Ranks) -> Iterator[subprocess.Popen[str]]:
    process = start_child(
        [sys.executable, "-m", "tests.e2e.sending", ranks.trainer],
        text=True,
        env={**os.environ, **ranks.everywhere},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:  # closes its input, at which it ends
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _send(trainer: subprocess.Popen[str], **order: Any) -> dict[str, Any]:
    """Let the trainer send an update, and return its report."""
    assert trainer.stdin is not None and trainer.stdout is not None
    trainer.stdin.write(json.dumps(order) + "\n")
    trainer.stdin.flush()
    line = trainer.stdout.readline()
    assert line, f"the trainer ended with exit code {trainer.wait()}; its error is above"
    report: dict[str, Any] = json.loads(line)
    return report
