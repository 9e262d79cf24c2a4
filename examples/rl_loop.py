"""Reinforcement learning on a laptop: SmolLM2-135M learns to answer sums and to stop after the answer.

    python -m examples.rl_loop [--seed 1] [--device cuda] [--kill-engine-at 3]

Each step rolls out several samples of a few questions through `segue serve`, scores them by a rule, takes one
policy gradient step on a torch model, and sends the new weights to the server. Advantages are relative to the
other samples of a question (GRPO, arXiv:2402.03300); the ratio of a token's probability in the trainer to its
probability in the engine is clipped (PPO, arXiv:1707.06347).

With --kill-engine-at N two engines share their weights (`segue serve --shadows 1`), and the one that serves
is killed by SIGKILL in the middle of step N: during its rollout, or with --kill-during send while it gets the
new weights. The other engine goes on with the samples, or gets the weights again.

A run succeeds if the mean reward of the last five steps is at least MARGIN above that of the first five.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor

from bench.plot import charts
from bench.report import circumstances
from segue.checkpoint.source import resolve
from segue.cluster.pod_process import PodProcess, TakeoverTimes
from segue.config import EngineConfig
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.http_client import open_url
from segue.trainer import Progress, WeightSender, WeightSendError
from segue.trainer.model import load_model
from segue.weight_update.payload.decode import encode

MARGIN = 0.2  # by which the reward, between 0 and 1, must rise
WINDOW = 5  # first and last steps whose mean rewards are compared
CLIP = 0.2
MICRO_BATCH = 8  # samples per forward and backward pass, which bounds the memory of activations

SEND_TRIES = 5  # while engines die

console = Console(highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    seed: int = 0
    device: str = "cpu"
    num_steps: int = 16
    num_prompts: int = 4  # per step
    group_size: int = 8  # samples per prompt
    max_tokens: int = 24
    learning_rate: float = 2e-5
    model: str = ""  # a directory or a hub id; "": the bundled model
    kill_engine_at: int = -1  # the step in which the engine that serves is killed; -1: none
    kill_during: str = "rollout"  # or "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    answer: int


@dataclass(slots=True, kw_only=True)
class Sample:
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]  # of the output tokens, as the engine returned them
    text: str
    versions: list[str]  # of the weights that made the tokens, in their order
    has_ended: bool  # whether the answer ended by itself, within `max_tokens`
    is_right: bool  # whether the last number in the text is the sum
    advantage: float = 0.0

    @property
    def reward(self) -> float:
        return (self.has_ended + self.is_right) / 2


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


def ask(numbers: random.Random) -> Question:
    a, b = numbers.randint(1, 9), numbers.randint(1, 9)
    return Question(
        prompt=f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n", answer=a + b
    )


class Policy:
    """The model in training: float32 weights, bfloat16 arithmetic, AdamW."""

    def __init__(self, device: str, settings: Settings) -> None:
        cache = EngineConfig.create().cache_dir
        source = resolve(settings.model or None, "auto", cache)  # the same files as the engine
        self.model = load_model(source, torch.float32).to(device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(source.tokenizer_directory)
        rate = settings.learning_rate
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)

    def improve(self, samples: list[Sample]) -> tuple[float, float]:
        """Take one step; return the logprob gap of engine and trainer, and the share of clipped ratios."""
        num_tokens = sum(len(sample.output_ids) for sample in samples)
        gap = clipped = 0.0
        for first in range(0, len(samples), MICRO_BATCH):
            part = samples[first : first + MICRO_BATCH]
            ours, theirs, mask = self._logprobs(part)
            advantages = torch.tensor([[sample.advantage] for sample in part], device=ours.device)
            ratio = (ours - theirs).exp()
            bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantages, bounded * advantages)
            torch.autograd.backward(-(gain * mask).sum() / num_tokens)
            gap += ((ours - theirs).abs() * mask).sum().item() / num_tokens
            clipped += ((ratio != bounded) * mask).sum().item() / num_tokens
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return gap, clipped

    def _logprobs(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trainer's logprobs, the engine's, and the token mask, all ``[samples, longest output]``.

        Sequences are padded at their ends, which causal attention ignores.
        """
        pad = torch.nn.utils.rnn.pad_sequence
        device = self.model.device
        tokens = pad([torch.tensor(s.prompt_ids + s.output_ids) for s in samples], batch_first=True).to(
            device
        )
        theirs = pad([torch.tensor(s.logprobs) for s in samples], batch_first=True).to(device)
        mask = pad([torch.ones(len(s.output_ids)) for s in samples], batch_first=True).to(device)
        rows = torch.arange(len(samples), device=device)[:, None]
        starts = torch.tensor([[len(s.prompt_ids)] for s in samples], device=device)
        positions = (starts + torch.arange(theirs.shape[1], device=device)).clamp(max=tokens.shape[1] - 1)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=tokens).last_hidden_state[rows, positions - 1]
            logits = self.model.lm_head(hidden)
        chosen = tokens[rows, positions]
        ours = -torch.nn.functional.cross_entropy(logits.float().mT, chosen, reduction="none")
        return ours, theirs, mask


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """Post JSON, or get it if there is none to post."""
    data = None if body is None else json.dumps(body).encode()
    with open_url(url, data, api_key=None, timeout_s=300) as response:
        answer = response.read().decode()
    if response.status != 200:
        sys.exit(f"{url} answered {response.status}: {answer}")
    return json.loads(answer)


def roll_out(url: str, policy: Policy, settings: Settings, numbers: random.Random) -> list[Sample]:
    """Draw some questions, sample a group of answers to each, and set the advantages within each group."""
    questions = [ask(numbers) for _ in range(settings.num_prompts)]
    repeated = [question for question in questions for _ in range(settings.group_size)]
    prompts = [policy.tokenizer(question.prompt)["input_ids"] for question in repeated]
    sampling = {"temperature": 1.0, "max_new_tokens": settings.max_tokens}
    body = {
        "input_ids": prompts,
        "sampling_params": [{**sampling, "seed": numbers.getrandbits(31)} for _ in prompts],
        "return_logprob": True,
    }
    replies = call(f"{url}/generate", body)
    samples = [sample_of(*each) for each in zip(repeated, prompts, replies, strict=True)]
    for first in range(0, len(samples), settings.group_size):
        group = samples[first : first + settings.group_size]
        rewards = [sample.reward for sample in group]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        for sample in group:
            sample.advantage = (sample.reward - mean) / (deviation + 0.01)
    return samples


def sample_of(question: Question, prompt_ids: list[int], reply: dict[str, Any]) -> Sample:
    meta = reply["meta_info"]
    found = re.findall(r"\d+", reply["text"])
    return Sample(
        prompt_ids=prompt_ids,
        output_ids=reply["output_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        text=reply["text"],
        has_ended=meta["finish_reason"]["type"] == "stop",
        is_right=bool(found) and int(found[-1]) == question.answer,
        versions=[each["version"] for each in meta["weight_versions"]],
    )


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


class Killer:
    """Kills the engine that serves, once, as soon as a condition holds."""

    def __init__(self, pod: PodProcess, is_time: Callable[[], bool]) -> None:
        self._pod = pod
        self._is_time = is_time
        self._is_over = threading.Event()
        self._times: TakeoverTimes | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._times is None:
            sys.exit("the step ended before the engine was killed; give more --max-tokens")
        console.print(
            f"{self._times.victim.engine} was killed, and {self._times.successor.engine} serves after "
            f"{self._times.record_s:.2f} s"
        )

    def _run(self) -> None:
        while not self._is_over.is_set():
            if self._is_time():
                self._times = self._pod.kill_serving()
                return
            time.sleep(0.002)


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
            return train(settings, policy, transport, url, None)
    with PodProcess(serve_options(settings)) as pod:
        return train(settings, policy, transport, pod.url, pod)


def train(settings: Settings, policy: Policy, transport: str, url: str, pod: PodProcess | None) -> Outcome:
    """Take all steps; kill the engine that serves in one of them if there is a pod."""
    numbers = random.Random(settings.seed)
    steps: list[TrainingStep] = []
    num_buckets = 0  # that were sent so far

    def count(progress: Progress) -> None:
        nonlocal num_buckets
        num_buckets += 1

    def killing(index: int, moment: str, is_time: Callable[[], bool]) -> AbstractContextManager[None]:
        """Kill the engine during a part of a step, if this is the one."""
        is_now = (index, moment) == (settings.kill_engine_at, settings.kill_during)
        return Killer(pod, is_time) if is_now and pod is not None else nullcontext()

    with sending(url, policy.model, transport, count) as send:
        for index in range(settings.num_steps):
            began = time.perf_counter()
            before = num_generated(url) if pod is not None else 0
            with killing(index, "rollout", lambda before=before: num_generated(url) > before):  # type: ignore[misc]
                samples = roll_out(url, policy, settings, numbers)
            version = str(index)
            wrong = {each for sample in samples for each in sample.versions} - {version}
            if wrong:
                sys.exit(f"tokens of weights {', '.join(wrong)}; the engine should have {version}")
            rolled_out = time.perf_counter()
            gap, clipped = policy.improve(samples)
            trained = time.perf_counter()
            sent = num_buckets
            with killing(index, "send", lambda sent=sent: num_buckets > sent):  # type: ignore[misc]
                send(str(index + 1))
            steps.append(
                TrainingStep(
                    reward=statistics.fmean(sample.reward for sample in samples),
                    ended=statistics.fmean(sample.has_ended for sample in samples),
                    right=statistics.fmean(sample.is_right for sample in samples),
                    weight_version=version,
                    logprob_gap=gap,
                    clipped=clipped,
                    rollout_s=rolled_out - began,
                    train_s=trained - rolled_out,
                    sync_s=time.perf_counter() - trained,
                    example=samples[0].text,
                )
            )
            show(index, steps[-1])
    shared = "" if pod is None else shared_version(pod)
    return Outcome(steps, call(f"{url}/weight_version")["weight_version"], shared)


def shared_version(pod: PodProcess) -> str:
    """Return the version of the weights that all engines of the pod have, and those that will be started."""
    with GmsClient(GmsTarget(directory=str(pod.gms_dir), tag="watch")) as client:
        status = client.status()
    (current,) = (each["current"] for each in status["cohorts"].values())
    (version,) = (each["version"] for each in status["generations"] if each["generation"] == current)
    return str(version)


def show(index: int, step: TrainingStep) -> None:
    console.print(
        f"step {index:2}  reward {step.reward:.2f}  ended {step.ended:.2f}  right {step.right:.2f}  "
        f"|engine - trainer| {step.logprob_gap:.3f} nats  clipped {step.clipped:.1%}  "
        f"rollout {step.rollout_s:.1f} s  train {step.train_s:.1f} s  sync {step.sync_s:.2f} s  "
        f"{step.example!r}",
        markup=False,
        soft_wrap=True,
    )


def rise(steps: list[TrainingStep]) -> tuple[float, float]:
    """Return the mean rewards of the first and of the last WINDOW steps."""
    rewards = [step.reward for step in steps]
    return statistics.fmean(rewards[:WINDOW]), statistics.fmean(rewards[-WINDOW:])


def write(output: Path, settings: Settings, outcome: Outcome, seconds: float) -> None:
    """Write `output`.json and `output`.svg."""
    steps = outcome.steps
    first, last = rise(steps)
    cpu = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    record = {
        "circumstances": circumstances(),
        "settings": asdict(settings),
        "margin": MARGIN,
        "reward of the first steps": first,
        "reward of the last steps": last,
        "weights served at the end": outcome.served_version,
        "weights of the memory service": outcome.shared_version,
        "seconds": seconds,
        "CPU seconds": sum(usage.ru_utime + usage.ru_stime for usage in cpu),
        "trainer's peak memory, GiB": cpu[0].ru_maxrss / (1 << 20),
        "steps": [asdict(step) for step in steps],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("rl_example"), help="path without suffix: .json, .svg"
    )
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    output = options.pop("output")
    settings = Settings(**options)
    if settings.kill_during not in ("rollout", "send"):
        parser.error(f"--kill-during {settings.kill_during}: choose rollout or send")
    if settings.kill_engine_at >= settings.num_steps:
        parser.error(f"--kill-engine-at {settings.kill_engine_at}: steps count from 0 to --num-steps less 1")
    began = time.perf_counter()
    outcome = run(settings)
    write(output, settings, outcome, time.perf_counter() - began)
    first, last = rise(outcome.steps)
    console.print(
        f"mean reward of the first {WINDOW} steps {first:.3f}, of the last {last:.3f}; see {output}.svg"
    )
    if settings.num_steps >= 2 * WINDOW and last < first + MARGIN:
        sys.exit(f"the mean reward should have risen by {MARGIN}")


if __name__ == "__main__":
    main()
