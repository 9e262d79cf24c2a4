"""The loop of the examples of reinforcement learning: its steps, a killed engine, and the figures."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.report import circumstances
from examples.sums import Generate, LoopSettings, Policy, Sample, roll_out
from segue.cluster.pod_process import EnginePart, PodProcess, TakeoverTimes
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.http_client import open_url

MARGIN = 0.2  # by which the reward, between 0 and 1, must rise
WINDOW = 5  # first and last steps whose mean rewards are compared

console = Console(highlight=False)
S = TypeVar("S", bound=LoopSettings)

# What happens around a part of a step, "rollout" or "send", beside the part itself.
During = Callable[[int, str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    reward: float  # mean over the samples
    ended: float  # share of the samples
    right: float  # share of the samples
    weight_version: str  # of all samples
    logprob_gap: float  # mean over tokens of |engine's - trainer's logprob|, in nats; 0 for equal models
    clipped: float  # share of the tokens whose ratio was clipped
    rollout_s: float
    train_s: float
    sync_s: float
    example: str


def train(
    settings: LoopSettings,
    policy: Policy,
    generate: Generate,
    send: Callable[[str], object],
    during: During,
) -> list[TrainingStep]:
    """Take all steps; `send` gets the version of the new weights.

    Raises:
        SystemExit: a token was made by other weights than those of its step.
    """
    numbers = random.Random(settings.seed)
    steps: list[TrainingStep] = []
    for index in range(settings.num_steps):
        began = time.perf_counter()
        with during(index, "rollout"):
            samples = roll_out(generate, policy, settings, numbers)
        version = str(index)
        wrong = {each for sample in samples for each in sample.versions} - {version}
        if wrong:
            sys.exit(
                f"step {index}: tokens were generated with weights of version {', '.join(wrong)}, but must "
                f"come from version {version}; look in the engine's log for why it missed an update"
            )
        rolled_out = time.perf_counter()
        gap, clipped = policy.improve(samples)
        trained = time.perf_counter()
        with during(index, "send"):
            send(str(index + 1))
        seconds = (rolled_out - began, trained - rolled_out, time.perf_counter() - trained)
        steps.append(step_of(samples, version, gap, clipped, *seconds))
        show(index, steps[-1])
    return steps


def step_of(
    samples: list[Sample],
    version: str,
    gap: float,
    clipped: float,
    rollout_s: float,
    train_s: float,
    sync_s: float,
) -> TrainingStep:
    return TrainingStep(
        reward=statistics.fmean(sample.reward for sample in samples),
        ended=statistics.fmean(sample.has_ended for sample in samples),
        right=statistics.fmean(sample.is_right for sample in samples),
        weight_version=version,
        logprob_gap=gap,
        clipped=clipped,
        rollout_s=rollout_s,
        train_s=train_s,
        sync_s=sync_s,
        example=samples[0].text,
    )


def show(index: int, step: TrainingStep) -> None:
    console.print(
        f"step {index:2}  reward {step.reward:.2f}  ended {step.ended:.2f}  right {step.right:.2f}  "
        f"|engine - trainer| {step.logprob_gap:.3f} nats  clipped {step.clipped:.1%}  "
        f"rollout {step.rollout_s:.1f} s  train {step.train_s:.1f} s  sync {step.sync_s:.2f} s  "
        f"{step.example!r}",
        markup=False,
        soft_wrap=True,
    )


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """Post JSON, or get it if there is none to post."""
    data = None if body is None else json.dumps(body).encode()
    with open_url(url, data, api_key=None, timeout_s=300) as response:
        answer = response.read().decode()
    if response.status != 200:
        sys.exit(f"{url} answered {response.status}: {answer}")
    return json.loads(answer)


class Killer:
    """Kills the engine that serves, once, as soon as a condition holds."""

    def __init__(self, pod: PodProcess, is_time: Callable[[], bool], part: EnginePart = "front") -> None:
        self.times: TakeoverTimes | None = None
        self._pod = pod
        self._is_time = is_time
        self._part = part
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self.times is None:
            sys.exit("the step ended before the engine was killed; give more --max-tokens")
        console.print(
            f"{self.times.victim.engine} was killed, and {self.times.successor.engine} serves after "
            f"{self.times.record_s:.2f} s"
        )

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self._is_time():
                self.times = self._pod.kill_serving(self._part)
                return
            time.sleep(0.002)


def shared_versions(pod: PodProcess) -> dict[str, str]:
    """Return, by cohort, the version of the weights that its engines have, and those that will be started."""
    with GmsClient(GmsTarget(directory=str(pod.gms_dir), tag="watch")) as client:
        status = client.status()
    versions = {each["generation"]: str(each["version"]) for each in status["generations"]}
    return {name: versions[each["current"]] for name, each in status["cohorts"].items()}


def rise(steps: list[TrainingStep]) -> tuple[float, float]:
    """Return the mean rewards of the first and of the last WINDOW steps."""
    rewards = [step.reward for step in steps]
    return statistics.fmean(rewards[:WINDOW]), statistics.fmean(rewards[-WINDOW:])


def write(
    output: Path, settings: LoopSettings, steps: list[TrainingStep], seconds: float, more: dict[str, Any]
) -> None:
    """Write `output`.json, with the figures of one example alone, `more`, before the steps."""
    first, last = rise(steps)
    cpu = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    record = {
        "circumstances": circumstances(),
        "load": os.getloadavg(),
        "settings": asdict(settings),
        "margin": MARGIN,
        "reward of the first steps": first,
        "reward of the last steps": last,
        **more,
        "seconds": seconds,
        "CPU seconds": sum(usage.ru_utime + usage.ru_stime for usage in cpu),
        "trainer's peak memory, GiB": cpu[0].ru_maxrss / (1 << 20),
        "steps": [asdict(step) for step in steps],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def read_settings(kind: type[S], text: str | None, output: str) -> tuple[S, Path]:
    """Return the settings of the command line, and the path of the results without suffix."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(output), help="path without suffix: .json, .svg")
    for name, default in asdict(kind()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    path = options.pop("output")
    settings = kind(**options)
    if settings.kill_engine_at >= settings.num_steps:
        parser.error(f"--kill-engine-at {settings.kill_engine_at}: steps count from 0 to --num-steps less 1")
    return settings, path


def judge(steps: list[TrainingStep], output: Path) -> None:
    """Say how far the reward has risen.

    Raises:
        SystemExit: by less than MARGIN, although there were enough steps.
    """
    first, last = rise(steps)
    console.print(
        f"mean reward of the first {WINDOW} steps {first:.3f}, of the last {last:.3f}; see {output}.svg"
    )
    if len(steps) >= 2 * WINDOW and last < first + MARGIN:
        sys.exit(
            f"the mean reward rose by {last - first:.3f}, and must rise by {MARGIN}; "
            "try another --seed, or more steps"
        )
