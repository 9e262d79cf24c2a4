"""One system: a model is trained, and served by a prefill and a decode engine, of which one is killed.

    python -m examples.rl_cluster [--seed 1] [--kill-engine-at 7]

The model, the questions and the policy gradient are those of `examples.rl_loop`. This starts
`segue cluster --prefill 1 --decode 1 --shadows 1`: a router, two engines, and behind each of them one that
stands by. The trainer asks the router for its samples, each of which is a stream of its own, and sends the
new weights to the engines that the router names; those that stand by follow through the memory service.
Beside the trainer a chat goes on, a reply every few seconds, also while it trains and while weights arrive.

In the middle of the rollout of one step all processes of the decode engine are killed by SIGKILL. The one
that stands by goes on with the streams, behind the tokens that their clients have, and with the same weights.

A run succeeds if no client sees an error, and the mean reward of the last five steps is at least MARGIN above
that of the first five. At the end it draws the reward, the versions of the weights, and the gaps between
the tokens that clients have got.
"""

from __future__ import annotations

import json
import re
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import chain, count, pairwise
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
from segue.cluster.pod_process import PodProcess, TakeoverTimes
from segue.host import usable_cores
from segue.http_client import open_url
from segue.trainer import WeightSender
from segue.trainer.endpoint import Endpoint

CHAT_TOKENS = 32  # of each of its replies
READING_S = 3.0  # between two of them
KILL_AFTER = 2  # tokens per sample, on the average, that have come when the engine is killed
NUM_SPANS = 80  # of the chart, in each of which the chat's longest gap is a point
MOVED = re.compile(r"^segue:router_(retries|resumes)_total ([0-9.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoopSettings(LoopSettings):
    num_steps: int = 14
    kill_engine_at: int = 7


@dataclass(slots=True)
class ClientStream:
    """One streamed reply of /generate, as its client has seen it; times are those of `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    tokens: list[tuple[float, int]] = field(default_factory=list)  # when some came, and how many there were
    reply: dict[str, Any] = field(default_factory=dict)  # the last event, which has all of it
    error: str = ""

    def read(self, url: str, body: dict[str, Any]) -> None:
        """Send the request, and read the reply to its end."""
        is_done = False
        try:
            data = json.dumps(body | {"stream": True}).encode()
            with open_url(f"{url}/generate", data, api_key=None, timeout_s=120) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self.reply = json.loads(line[6:])
                        self.tokens.append((time.monotonic(), self.reply["meta_info"]["completion_tokens"]))
                    is_done = is_done or line.startswith(b"data: [DONE]")
            if not is_done or self.reply["meta_info"]["finish_reason"]["type"] not in ("stop", "length"):
                self.error = f"status {response.status}, and the end of the reply is {self.reply}"
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            self.error = f"{error!r} behind {self.reply}"

    @property
    def waits(self) -> list[tuple[float, float]]:
        """When tokens came, and the seconds since those before, or since the request."""
        times = [self.began, *(at for at, _ in self.tokens)]
        return [(after, after - before) for before, after in pairwise(times)]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Those of its waits that are between two tokens."""
        return self.waits[1:]

    @property
    def versions(self) -> list[tuple[float, str]]:
        """When the first and the last token of each version of the weights came."""
        return [
            (next(at for at, num in self.tokens if num > token), span["version"])
            for span in self.reply["meta_info"]["weight_versions"]
            for token in (span["start"], span["end"] - 1)
        ]


class RouterClients:
    """All clients of the router: those that draw samples for the trainer, and a chat."""

    def __init__(self, url: str) -> None:
        self.samples: list[list[ClientStream]] = []  # by step
        self.chat: list[ClientStream] = []
        self._url = url

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Draw the samples of a step at the same time."""
        streams = [ClientStream() for _ in prompts]
        self.samples.append(streams)
        bodies = (
            {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            for prompt, params in zip(prompts, sampling, strict=True)
        )
        with ThreadPoolExecutor(len(streams)) as pool:
            list(pool.map(lambda stream, body: stream.read(self._url, body), streams, bodies))
        if failed := [stream.error for stream in streams if stream.error]:
            sys.exit(f"{len(failed)} of {len(streams)} samples failed: {failed[0]}")
        return [stream.reply for stream in streams]

    @contextmanager
    def chatting(self) -> Iterator[None]:
        """Ask for one reply after the other, as someone does who reads them, while the block runs."""
        is_over = threading.Event()

        def chat() -> None:
            sampling = {"temperature": 1.0, "max_new_tokens": CHAT_TOKENS, "ignore_eos": True}
            for number in count():
                if is_over.is_set():
                    return
                text = f"<|im_start|>user\nTell me story {number}.<|im_end|>\n<|im_start|>assistant\n"
                self.chat.append(ClientStream())
                self.chat[-1].read(self._url, {"text": text, "sampling_params": sampling})
                is_over.wait(READING_S)

        thread = threading.Thread(target=chat)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @property
    def streams(self) -> list[ClientStream]:
        return [*self.chat, *chain(*self.samples)]


@dataclass(slots=True)
class System:
    """What was seen of a whole run; times are those of `time.monotonic`."""

    began: float
    clients: RouterClients
    steps: list[TrainingStep] = field(default_factory=list)
    sent: list[tuple[float, str]] = field(
        default_factory=list
    )  # when all engines had a version of the weights
    kill: TakeoverTimes | None = None
    moved: dict[str, int] = field(default_factory=dict)  # requests that the router has sent elsewhere
    served_version: str = ""  # by both engines at the end
    shared_versions: dict[str, str] = field(default_factory=dict)  # in the memory service, by worker


def run(settings: ClusterLoopSettings) -> System:
    torch.manual_seed(settings.seed)
    torch.set_num_threads(max(1, usable_cores() - 1))  # the chat's engine has the other core
    policy = Policy("cpu", settings)
    options = ["--prefill=1", "--decode=1", "--device=cpu", "--num-kv-tokens=16384", "--max-model-len=1024"]
    options += [f"--model={settings.model}"] if settings.model else []
    key = secrets.token_urlsafe(32)  # of the engines, which the sender of the weights calls directly
    variables = {"SEGUE_WORKER_API_KEY": key}
    began = time.monotonic()
    with PodProcess(options, command="cluster", cohort="decode-0", variables=variables) as pod:
        console.print(
            f"router, two engines and two that stand by serve after {time.monotonic() - began:.1f} s"
        )
        system = System(time.monotonic(), RouterClients(pod.url))
        # gloo, because the weights are on the CPU: one broadcast reaches both engines.
        with (
            WeightSender(
                Endpoint(url=pod.url, worker_api_key=key), policy.model, buffer_size_mb=64
            ) as sender,
            system.clients.chatting(),
        ):
            follow(settings, policy, pod, sender, system)
        system.served_version = call(f"{pod.url}/weight_version")["weight_version"]
        system.shared_versions = shared_versions(pod)
        with open_url(f"{pod.url}/metrics", None, api_key=None, timeout_s=60) as response:
            found = MOVED.findall(response.read().decode())
            system.moved = {name: round(float(number)) for name, number in found}
    return system


def follow(
    settings: ClusterLoopSettings, policy: Policy, pod: PodProcess, sender: WeightSender, system: System
) -> None:
    """Take all steps; kill the decode engine in the middle of the rollout of one."""
    killers: list[Killer] = []

    def is_in_the_middle() -> bool:
        """Whether the samples of this step have some tokens."""
        streams = list(chain(*system.clients.samples[settings.kill_engine_at :]))
        num_tokens = sum(stream.tokens[-1][1] for stream in streams if stream.tokens)
        return num_tokens > 0 and num_tokens >= KILL_AFTER * len(streams)

    def during(index: int, moment: str) -> AbstractContextManager[None]:
        if (index, moment) != (settings.kill_engine_at, "rollout"):
            return nullcontext()
        pod.wait_for_standby()
        killers.append(Killer(pod, is_in_the_middle, "engine"))
        return killers[-1]

    def send(version: str) -> None:
        sender.send(version)
        system.sent.append((time.monotonic(), version))

    system.steps = train(settings, policy, system.clients.generate, send, during)
    system.kill = killers[0].times if killers else None


def figures(system: System) -> dict[str, Any]:
    """Return what is not about the training: clients, waits, versions, and the kill; times in seconds."""
    kill, clients, began = system.kill, system.clients, system.began
    waits = [wait for stream in clients.streams for wait in stream.waits]
    found: dict[str, Any] = {
        "client errors": [stream.error for stream in clients.streams if stream.error],
        "samples": sum(map(len, clients.samples)),
        "replies of the chat": len(clients.chat),
        "tokens that came": sum(stream.tokens[-1][1] for stream in clients.streams if stream.tokens),
        "wait of the chat, median": statistics.median(s for stream in clients.chat for _, s in stream.waits),
        "steps' longest waits of samples": [longest(each.waits for each in step) for step in clients.samples],
        "steps' longest gaps of samples": [longest(each.gaps for each in step) for step in clients.samples],
        "seconds of the loop": system.sent[-1][0] - began,
        "when all engines had the weights": [(at - began, version) for at, version in system.sent],
        "weights served at the end": system.served_version,
        "weights of the memory service": system.shared_versions,
        "requests sent elsewhere": system.moved,
    }
    if kill is not None:
        at = kill.killed_at
        served = at + kill.record_s
        # What was under way when the engine died still comes behind the kill.
        over = {wait for wait in waits if wait[0] > at and wait[0] - wait[1] < served}
        running = [each for each in clients.streams if each.tokens and each.began < at < each.tokens[-1][0]]
        found["kill"] = {
            "at": at - began,
            "victim": kill.victim.engine,
            "successor": kill.successor.engine,
            "streams that it cut": sum(each.tokens[0][0] < at for each in running),
            "streams without a token yet": sum(each.tokens[0][0] >= at for each in running),
            "engine had ended after": kill.dead_s,
            "successor served after": kill.record_s,
            "longest wait over it": max(seconds for _, seconds in over),
            "longest wait elsewhere": max(wait[1] for wait in waits if wait not in over),
            "longest gap elsewhere": longest(set(each.gaps) - over for each in clients.streams),
        }
    return found


def longest(waits: Iterable[Iterable[tuple[float, float]]]) -> float:
    return max((seconds for each in waits for _, seconds in each), default=0.0)


def draw(output: Path, system: System) -> None:
    """Write `output`.svg: three charts over the seconds of the loop, in each of which the kill is a line."""
    began, clients = system.began, system.clients
    rolled_out = [max(stream.tokens[-1][0] for stream in step) - began for step in clients.samples]
    rewards = {
        name: [(at, getattr(step, name)) for at, step in zip(rolled_out, system.steps, strict=True)]
        for name in ("reward", "ended", "right")
    }
    sent = [(0.0, 0.0), *((at - began, float(version)) for at, version in system.sent)]
    stairs = [sent[0], *(point for (_, old), (at, new) in pairwise(sent) for point in ((at, old), (at, new)))]
    versions = {
        "sent to both engines": stairs,
        "of the chat's tokens": [
            (at - began, float(version)) for stream in clients.chat for at, version in stream.versions
        ],
    }
    span = (system.sent[-1][0] - began) / NUM_SPANS
    of_chat: dict[int, float] = {}
    for at, seconds in chain(*(stream.gaps for stream in clients.chat)):
        index = int((at - began) / span)
        of_chat[index] = max(seconds, of_chat.get(index, 0.0))
    gaps = {
        "chat": [(span * (index + 0.5), seconds) for index, seconds in sorted(of_chat.items())],
        "samples, longest of each step": [
            (at, longest(stream.gaps for stream in step))
            for at, step in zip(rolled_out, clients.samples, strict=True)
        ],
    }
    panels = {
        "reward of each step, and its two halves": rewards,
        "version of the weights": versions,
        "longest gap between tokens, s": gaps,
    }
    marks = {} if system.kill is None else {"decode engine killed": system.kill.killed_at - began}
    charts(output.with_suffix(".svg"), panels, "seconds", marks)


def main() -> None:
    settings, output = read_settings(ClusterLoopSettings, __doc__, "rl_cluster")
    began = time.monotonic()
    system = run(settings)
    found = figures(system)
    write(output, settings, system.steps, time.monotonic() - began, found)
    draw(output, system)
    if "kill" in found:
        console.print(", ".join(f"{name} {value}" for name, value in found["kill"].items()))
    judge(system.steps, output)
    if found["client errors"]:
        sys.exit(f"{len(found['client errors'])} clients saw errors: {found['client errors'][0]}")


if __name__ == "__main__":
    main()
