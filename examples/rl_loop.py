"""Reinforcement learning on a laptop: SmolLM2-135M learns to answer sums and to stop after the answer.

    python -m examples.rl_loop [--seed 1] [--device cuda] [--kill-engine-at 3]

Each step rolls out several samples of a few questions through `segue serve`, scores them by a rule, takes one
policy gradient step on a torch model, and sends the new weights to the server. The questions, the rule and
the policy gradient are in `examples/sums.py`, and the loop is in `examples/training_loop.py`.

With --kill-engine-at N two engines share their weights (`segue serve --shadows 1`), and the one that serves
is killed by SIGKILL in the middle of step N: during its rollout, or with --kill-during send while it gets the
new weights. The other engine goes on with the samples, or gets the weights again.

A run succeeds if the mean reward of the last five steps is at least MARGIN above that of the first five.
"""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.plot import charts
from examples.sums import LoopSettings, Policy
from examples.training_loop import (
    Killer,
    TrainingStep,
    call,
    console,
    judge,
    read_settings,
    shared_versions,
    train,
    write,
)
from segue.cluster.pod_process import PodProcess
from segue.trainer import Progress, WeightSender, WeightSendError
from segue.weight_update.payload.decode import encode

SEND_TRIES = 5  # while engines die


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(LoopSettings):
    device: str = "cpu"
    kill_during: str = "rollout"  # or "send"


def serve_options(settings: Settings) -> list[str]:
    """Return options of `segue serve`; the small KV cache leaves most of a GPU to the trainer."""
    options = [f"--device={settings.device}", "--num-kv-tokens=65536", "--max-model-len=1024"]
    return options + ([f"--model={settings.model}"] if settings.model else [])


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Start `segue serve`, and yield its URL."""
    command = [sys.executable, "-m", "segue", "serve", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen([*command, *serve_options(settings)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = (re.search(r"http://\S+", line) for line in process.stdout)
            address = next((match for match in addresses if match), None)
            if address is None:
                sys.exit("segue serve did not start; its message is above")
            yield address.group()
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def choose_transport(device: str) -> tuple[str, str]:
    """Return the device to train on, and the transport of the weights with the reason for it."""
    if device == "cpu":
        return "cpu", "gloo, because the weights are on the CPU"
    if torch.cuda.device_count() > 1:
        return "cuda:1", "NCCL, because the engine has GPU 0 and the trainer GPU 1"
    return "cuda:0", "CUDA IPC, because NCCL does not join two processes on one GPU"


def num_generated(url: str) -> int:
    """Return how many tokens the engine that serves has generated."""
    return int(call(f"{url}/server_info")["internal_states"][0]["num_generated_tokens"])


@contextmanager
def sending(
    url: str, model: torch.nn.Module, transport: str, on_progress: Callable[[Progress], None]
) -> Iterator[Callable[[str], object]]:
    """Yield a function that sends the model's weights under a version name."""
    if not transport.startswith("CUDA IPC"):
        with WeightSender([url], model, buffer_size_mb=64, on_progress=on_progress) as sender:
            yield lambda version: send_until_served(url, sender, version)
        return

    def send(version: str) -> None:
        payload = base64.b64encode(encode(model.named_parameters(), "flattened_bucket")).decode()
        body = {
            "serialized_named_tensors": [payload],
            "load_format": "flattened_bucket",
            "weight_version": version,
        }
        call(f"{url}/update_weights_from_tensor", body | {"flush_cache": False})
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    yield send


def send_until_served(url: str, sender: WeightSender, version: str) -> None:
    """Send the weights; if their engine dies meanwhile, send them again to the one that takes over.

    The engine may have died behind the commit, before its answer. Then its successor has the weights already.
    """
    for tries_left in reversed(range(SEND_TRIES)):
        try:
            sender.send(version)
            return
        except WeightSendError as error:
            if not tries_left:
                raise
            console.print(f"sending again, because {error.message}", markup=False)
        call(f"{url}/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})  # waits for it
        if call(f"{url}/weight_version")["weight_version"] == version:
            return


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run."""

    steps: list[TrainingStep]
    served_version: str  # that of the weights which are served at the end
    shared_version: str  # that of the memory service's current weights; "": there is no service


def run(settings: Settings) -> Outcome:
    torch.manual_seed(settings.seed)
    device, transport = choose_transport(settings.device)
    console.print(f"weights travel by {transport}")
    policy = Policy(device, settings)
    if settings.kill_engine_at < 0:
        with serving(settings) as url:
            return follow(settings, policy, transport, url, None)
    with PodProcess(serve_options(settings)) as pod:
        return follow(settings, policy, transport, pod.url, pod)


def follow(settings: Settings, policy: Policy, transport: str, url: str, pod: PodProcess | None) -> Outcome:
    """Take all steps; kill the engine that serves in one of them if there is a pod."""
    num_buckets = 0  # that were sent so far

    def count(progress: Progress) -> None:
        nonlocal num_buckets
        num_buckets += 1

    def killing(index: int, moment: str) -> AbstractContextManager[None]:
        """Kill the engine during a part of a step, if this is the one."""
        if pod is None or (index, moment) != (settings.kill_engine_at, settings.kill_during):
            return nullcontext()
        if moment == "send":
            sent = num_buckets
            return Killer(pod, lambda: num_buckets > sent)
        before = num_generated(url)
        return Killer(pod, lambda: num_generated(url) > before)

    def generate(prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        replies: list[dict[str, Any]] = call(f"{url}/generate", body)
        return replies

    with sending(url, policy.model, transport, count) as send:
        steps = train(settings, policy, generate, send, killing)
    shared = "" if pod is None else shared_versions(pod)[pod.cohort]
    return Outcome(steps, call(f"{url}/weight_version")["weight_version"], shared)


def draw(output: Path, steps: list[TrainingStep]) -> None:
    """Write `output`.svg."""
    curve = {
        name: [(float(i), getattr(step, name)) for i, step in enumerate(steps)]
        for name in ("reward", "ended", "right")
    }
    times = {
        name: [(float(i), getattr(step, f"{name}_s")) for i, step in enumerate(steps)]
        for name in ("rollout", "train", "sync")
    }
    charts(
        output.with_suffix(".svg"), {"reward, and its two halves": curve, "seconds per step": times}, "step"
    )


def main() -> None:
    settings, output = read_settings(Settings, __doc__, "rl_example")
    if settings.kill_during not in ("rollout", "send"):
        sys.exit(f"--kill-during {settings.kill_during}: choose rollout or send")
    began = time.perf_counter()
    outcome = run(settings)
    versions = {
        "weights served at the end": outcome.served_version,
        "weights of the memory service": outcome.shared_version,
    }
    write(output, settings, outcome.steps, time.perf_counter() - began, versions)
    draw(output, outcome.steps)
    judge(outcome.steps, output)


if __name__ == "__main__":
    main()
