"""A worker process without a model: the real scheduler and loop, with a runner that repeats the prompt.

It is the worker command of an engine. Environment variables make it slow or make it fail: ``FAKE_STEP_S`` is
the seconds per step. While the file ``FAKE_SLOW_WHILE`` exists, a step takes ten times as long, or until the
file is removed. ``FAKE_START`` is ``fail``, ``exit`` or ``hang``, ``FAKE_EXIT_AT_STEP`` is a step.
``FAKE_STALL_AT_STEP`` is one that never ends.
``FAKE_WAKE`` is what rank ``FAKE_WAKE_RANK`` (0) does when it is to wake: ``sleep`` for ever, ``gil``: the
same while it holds the GIL, ``stop`` itself, or ``fail``. ``FAKE_TOKEN`` is added to every output token.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as the real worker does, until all is imported

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.heartbeat import Turn, send_heartbeats
from segue.host import collect_from_now_on, end_with_parent
from segue.laps.limits import laps_limits
from segue.messages.control import EngineLimits, GraphCost, Ready, StartFailed
from segue.messages.guided import GuidedVocabulary
from segue.messages.life import EndWake, PingRanks, WakeRanks
from segue.messages.requests import TokenLogprob, unpack_ids
from segue.messages.steps import Drain, Drained, RankEvent, RankMessage, StepPlan, StepResult
from segue.scheduler.scheduler import Scheduler
from segue.worker.loop import SchedulerLoop
from segue.worker.rank_life import RankLife
from tests.worker.updaters import FakeMemory, FakeUpdater

LOGPROB = -0.5
RUNNER_UP_LOGPROB = -1.5


class Done:
    """A step whose result is known."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class FakeRank:
    """The part of a runner that an engine's life needs."""

    def __init__(self, tp: TPInfo) -> None:
        self.tp = tp

    def deep_ping(self) -> None:
        pass

    def wake(self, epoch: int, timeout_s: float) -> None:
        if self.tp.rank != int(os.environ.get("FAKE_WAKE_RANK", "0")):
            return
        match os.environ.get("FAKE_WAKE"):
            case "sleep":
                threading.Event().wait()
            case "gil":
                ctypes.PyDLL(None).sleep(600)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "fail":
                raise MemoryError("no pages are left")


class EchoRunner(FakeRank):
    """Output token k of a request is prompt token k. After the end of the prompt it begins again."""

    def __init__(self, vocab_size: int, tp: TPInfo) -> None:
        super().__init__(tp)
        self._token = int(os.environ.get("FAKE_TOKEN", "0"))
        self._vocab_size = vocab_size
        # slot -> prompt, logprobs, alternatives of prompt tokens
        self._slots: dict[int, tuple[list[int], int, int]] = {}
        self._step_s = float(os.environ.get("FAKE_STEP_S", "0"))
        self._slow_while = os.environ.get("FAKE_SLOW_WHILE")
        self._stall_at = int(os.environ.get("FAKE_STALL_AT_STEP", "0"))
        self._exit_at = int(os.environ.get("FAKE_EXIT_AT_STEP", "0"))

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        """It echoes, whatever a grammar says."""

    def can_guide(self) -> bool:
        """See `ModelRunner`."""
        return True

    def forget(self, slots: Sequence[int]) -> None:
        """It keeps no grammars."""

    def guided_ms(self) -> dict[str, float]:
        """It has no guided steps."""
        return {}

    def forward_batch(self, plan: StepPlan) -> Done:
        self._sleep()
        if plan.step == self._stall_at:
            threading.Event().wait()
        if plan.step == self._exit_at:
            os._exit(3)
        for new in plan.new_slots:
            params = new.params
            prompt = unpack_ids(new.tokens)[: new.prompt_len]
            self._slots[new.slot] = (prompt, params.logprobs, params.num_prompt_top)
        tokens: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        for index, slot in enumerate(plan.slots):
            prompt, num_logprobs, num_prompt_top = self._slots[slot]
            end = plan.starts[index] + plan.lens[index]
            following = range(end - plan.num_logits[index] + 1, min(end + 1, len(prompt)))
            if plan.num_logits[index] > plan.samples[index]:
                prompt_logprobs[slot] = [self._logprob(prompt[p], num_prompt_top) for p in following]
            if plan.samples[index]:
                token = (prompt[(end - len(prompt)) % len(prompt)] + self._token) % self._vocab_size
                tokens.append(token)
                logprobs.append(self._logprob(token, num_logprobs) if num_logprobs >= 0 else None)
        return Done(StepResult(plan.step, tokens, max(self._step_s, 1e-4), logprobs, prompt_logprobs))

    def _sleep(self) -> None:
        time.sleep(self._step_s)
        until = time.monotonic() + 9 * self._step_s
        while self._slow_while is not None and os.path.exists(self._slow_while) and time.monotonic() < until:
            time.sleep(min(self._step_s, 0.005))

    def _logprob(self, token: int, num_logprobs: int) -> TokenLogprob:
        top = [(token, LOGPROB), ((token + 1) % self._vocab_size, RUNNER_UP_LOGPROB)]
        return TokenLogprob(token, LOGPROB, top[: max(num_logprobs, 0)])


def watch_lifeline() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)


def follow(tp: TPInfo, run_dir: str, context: zmq.Context[Any]) -> None:
    """Any rank but 0: answers for its life, and computes nothing."""
    messages, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    messages.bind(f"ipc://{run_dir}/plan{tp.rank}")
    events.connect(f"ipc://{run_dir}/events")
    life = RankLife(FakeRank(tp), lambda answer: events.send(msgspec.msgpack.encode(answer)))
    decode = msgspec.msgpack.Decoder(RankMessage).decode
    while True:
        match message := decode(messages.recv()):
            case PingRanks() | WakeRanks() | EndWake():
                life.handle(message)
            case Drain():
                events.send(msgspec.msgpack.encode(Drained()))


def serve(config: EngineConfig, run_dir: str, tp: TPInfo, context: zmq.Context[Any], turn: Turn) -> None:
    to_scheduler, to_frontend = f"ipc://{run_dir}/to_scheduler", f"ipc://{run_dir}/to_frontend"
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.set_hwm(0)
    outbox.set_hwm(0)
    inbox.bind(to_scheduler)
    outbox.connect(to_frontend)
    match os.environ.get("FAKE_START"):
        case "fail":
            outbox.send(
                msgspec.msgpack.encode(StartFailed("OutOfMemoryError", "only 1 page fits; use more memory"))
            )
            outbox.close(linger=500)
            inbox.close()
            return
        case "exit":
            os._exit(7)
        case "hang":
            threading.Event().wait()
    assert config.model is not None
    hf_config = json.loads((Path(config.model) / "config.json").read_text())
    page_size, max_seq_len = config.page_size or 16, config.max_model_len or 512
    limits = EngineLimits(
        num_pages=(config.num_kv_tokens or 8 * max_seq_len) // page_size,
        page_size=page_size,
        max_seq_len=max_seq_len,
        max_running_requests=config.max_running_requests or 16,
        chunked_prefill_size=config.chunked_prefill_size or 512,
        laps=laps_limits(config, on_cpu=True),
    )
    ready = Ready(
        limits=limits,
        vocab_size=hf_config["vocab_size"],
        device="cpu",
        dtype="float32",
        attention_backend="fake",
        weight_bytes=0,
        kv_bytes=0,
        init_steps=[],
        role=config.role,
        graphs={"decode": GraphCost(num_graphs=3, seconds=1.5, num_bytes=1 << 20)},
    )
    outbox.send(msgspec.msgpack.encode(ready))
    events, replies = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    events.bind(f"ipc://{run_dir}/events")
    replies.connect(f"ipc://{run_dir}/events")
    followers = [context.socket(zmq.PUSH) for _ in range(1, tp.size)]
    for rank, follower in enumerate(followers, 1):
        follower.connect(f"ipc://{run_dir}/plan{rank}")

    def send(event: RankEvent) -> None:
        replies.send(msgspec.msgpack.encode(event))

    SchedulerLoop(
        Scheduler(limits, config),
        EchoRunner(ready.vocab_size, tp),
        FakeUpdater(send),
        memory=FakeMemory(send),
        inbox=inbox,
        outbox=outbox,
        events=events,
        followers=followers,
        overlap=not config.disable_overlap,
        memory_usage={},
        turn=turn,
    ).run()
    outbox.close(linger=500)
    for socket in (inbox, events, replies, *followers):
        socket.close(linger=0)


def main() -> None:
    collect_from_now_on()
    end_with_parent()
    spec = json.loads(sys.stdin.buffer.readline())
    run_dir = spec["run_dir"]
    threading.Thread(target=watch_lifeline, daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    config = EngineConfig(**spec["config"])
    with send_heartbeats(context, f"ipc://{run_dir}/to_frontend", spec["rank"], config.ping_s) as turn:
        tp = TPInfo(rank=spec["rank"], size=spec["size"])
        if tp.rank != 0:
            follow(tp, run_dir, context)
        serve(config, run_dir, tp, context, turn)
    context.term()


if __name__ == "__main__":
    main()
