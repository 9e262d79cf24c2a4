"""The worker process of one tensor-parallel rank, and rank 0's engine, which may also run embedded.

:mod:`segue.worker.entry` starts it with one line of JSON on standard input. The input then stays
open as a lifeline: when it closes, the worker ends. If the frontend has ended, the kernel kills the worker.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from segue.checkpoint.source import resolve_model
from segue.config import EngineConfig, Role
from segue.distributed.info import TPInfo
from segue.errors import EngineStartError, SegueError
from segue.heartbeat import Turn, send_heartbeats
from segue.host import end_with_parent, freeze_heap
from segue.kernels import compilations
from segue.kernels.compilations import Compilations, watched
from segue.kernels.compile_processes import can_compile, import_kernels
from segue.laps import cost
from segue.logs import configure, logger
from segue.memory.releasable import ReleasableMemory
from segue.messages.control import InitStep, Ready, StartFailed
from segue.messages.kv import RankAddress, RankJoined
from segue.messages.steps import KernelsCompiled, RankEvent
from segue.messages.weight_update import WeightsChanged
from segue.model_runner.runner import ModelRunner
from segue.scheduler.scheduler import Scheduler
from segue.weight_update.rank import WeightUpdater
from segue.weight_update.served import ServedWeights
from segue.worker.follower import follow
from segue.worker.kv_links import KVLinks, make_hello
from segue.worker.kv_mover import make_mover
from segue.worker.loop import SchedulerLoop
from segue.worker.profiling import RankProfiler
from segue.worker.released_memory import ReleasedMemory
from segue.worker.start_reports import StartReports
from segue.worker.warm_kv import make_warm_kv

# How long an idle loop polls before it sleeps, if the model runs on a GPU and so leaves cores free; a wake-up
# takes 0.1 ms or more there.
SPIN_S = 0.01


def run_scheduler(
    config: EngineConfig,
    run_dir: Path,
    addresses: tuple[str, str],
    context: zmq.Context[Any],
    *,
    size: int = 1,
    embedded: bool = False,
    shows_start: bool = False,
    turn: Turn | None = None,
) -> None:
    """Rank 0: start the engine and serve until ``Shutdown``.

    ``addresses`` are those of the frontend's messages and of the answers; ``size`` is the number of ranks.
    ``embedded`` means that the loop runs in the frontend's process, whose heap and cores it must leave alone.
    ``shows_start``: the frontend shows how the start gets on. Errors of the start are sent to the frontend
    as ``StartFailed``; later errors are raised.
    """
    inbox = open_socket(context, zmq.PULL, addresses[0], bind=True)
    outbox = open_socket(context, zmq.PUSH, addresses[1])
    followers = [
        open_socket(context, zmq.PUSH, _plan_address(run_dir, rank), bind=True) for rank in range(1, size)
    ]
    events = open_socket(context, zmq.PULL, _event_address(run_dir), bind=True)
    sender = EventSender(context, run_dir)
    try:
        started = start_runner(config, TPInfo(rank=0, size=size), run_dir, outbox, shows_start=shows_start)
        if started is None:
            return
        runner, steps = started
        with ExitStack() as stack:
            stack.enter_context(closing(runner))
            turn = turn or Turn()
            runner.memory.watch_owner(turn.note_owner)
            served = runner.served_weights()
            updater = stack.enter_context(closing(WeightUpdater(served, sender.send)))
            if runner.memory.generations is not None:
                runner.memory.generations.watch(partial(_tell_change, sender))
            scheduler = Scheduler(
                runner.limits,
                config,
                step_times=runner.step_times,
                num_ranks=size,
                vocab_size=runner.source.config.vocab_size,
            )
            links, mover = None, None
            if config.role != "both":
                mover, address = make_mover(config, runner, run_dir, sender.send)
                stack.callback(mover.close)
                ranks = [address, *_addresses_of_followers(events, size)]
                hello = make_hello(config, runner, ranks, scheduler)
                links = KVLinks(config, hello, scheduler.handover.machine, sender.send)
                stack.callback(links.close)
            loop = SchedulerLoop(
                scheduler,
                runner,
                updater,
                inbox=inbox,
                outbox=outbox,
                followers=followers,
                events=events,
                kv_links=links,
                mover=mover,
                memory=_released_memory(runner, served, sender),
                profiler=None if config.profile_dir is None else RankProfiler(runner, sender.send),
                warm=make_warm_kv(scheduler, runner) if config.warm_kv else None,
                generations=runner.memory.generations,
                overlap=not config.disable_overlap,
                spin=SPIN_S if runner.device.type != "cpu" and not embedded else 0.0,
                turn=turn,
                memory_usage={"weights": runner.weight_bytes, "kv_cache": runner.kv_bytes},
            )
            cost.warm_up()
            stack.enter_context(watched(runner.device, partial(_tell_compiled, sender, 0)))
            if not embedded:
                freeze_heap()
            control_address = None if links is None else links.address
            outbox.send(msgspec.msgpack.encode(_ready(runner, steps, config.role, control_address)))
            loop.run()
    finally:
        sender.close()
        for socket in (inbox, outbox, events, *followers):
            socket.close(linger=500)


def open_socket(
    context: zmq.Context[Any], kind: int, address: str, *, bind: bool = False
) -> zmq.Socket[bytes]:
    """Open a ZeroMQ socket of a ``kind`` (such as ``zmq.PUSH``) that queues messages without a limit."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set_hwm(0)
    (socket.bind if bind else socket.connect)(address)
    return socket


def start_runner(
    config: EngineConfig, tp: TPInfo, run_dir: Path, outbox: zmq.Socket[bytes], *, shows_start: bool = False
) -> tuple[ModelRunner, list[InitStep]] | None:
    """Initialise a rank's runner; returns it with the steps it took.

    ``shows_start``: the frontend shows the steps. If one fails, sends the reason to the frontend, and
    returns None.
    """
    reports = StartReports(tp.rank, outbox, is_shown=shows_start)
    try:
        source = resolve_model(config)
        on_bytes, on_kernels = (reports.loaded, reports.compiled) if shows_start else (None, None)
        runner = ModelRunner(config, source, tp, run_dir, reports.end, reports.begin, on_bytes, on_kernels)
        return runner, reports.steps
    except Exception as error:
        if not isinstance(error, SegueError):
            logger.exception("rank %d could not start", tp.rank)
            error = EngineStartError(f"rank {tp.rank}: {type(error).__name__}: {error}")
        outbox.send(msgspec.msgpack.encode(StartFailed(type(error).__name__, error.message)))
        return None
    finally:
        compilations.end_processes()


def _ready(runner: ModelRunner, steps: list[InitStep], role: Role, control_address: str | None) -> Ready:
    """Return the message that ends the start: what the frontend must know of the runner."""
    return Ready(
        limits=runner.limits,
        vocab_size=runner.vocab_size,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        attention_backend=runner.attention_backend,
        weight_bytes=runner.weight_bytes,
        kv_bytes=runner.kv_bytes,
        init_steps=steps,
        role=role,
        control_address=control_address,
        graphs=runner.graph_costs,
    )


def _addresses_of_followers(events: zmq.Socket[bytes], size: int) -> list[RankAddress]:
    """Return how the pools of all ranks but this one are reached; waits until the ranks have started."""
    decode = msgspec.msgpack.Decoder(RankJoined).decode
    joined = [decode(events.recv()) for _ in range(1, size)]
    return [each.address for each in sorted(joined, key=lambda each: each.rank)]


def _plan_address(run_dir: Path, rank: int) -> str:
    return f"ipc://{run_dir}/plan{rank}"


def _event_address(run_dir: Path) -> str:
    return f"ipc://{run_dir}/events"


class EventSender:
    """Sends a rank's events to rank 0; any of the rank's threads may use it."""

    def __init__(self, context: zmq.Context[Any], run_dir: Path) -> None:
        self._socket = open_socket(context, zmq.PUSH, _event_address(run_dir))
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, event: RankEvent) -> None:
        """Send an event without blocking; does nothing after :meth:`close`, when a thread may still run."""
        with self._lock:
            if not self._socket.closed:
                self._socket.send(self._encode(event))

    def close(self) -> None:
        """Close the socket; later events are dropped."""
        with self._lock:
            self._socket.close(linger=0)


def _run_follower(
    config: EngineConfig,
    tp: TPInfo,
    run_dir: Path,
    address: str,
    context: zmq.Context[Any],
    turn: Turn,
    *,
    shows_start: bool,
) -> None:
    """Any rank but 0: start the runner and follow rank 0's plans, for ever.

    It writes to the frontend, at ``address``, only if the start fails; all else goes to rank 0.
    """
    messages = open_socket(context, zmq.PULL, _plan_address(run_dir, tp.rank))
    outbox = open_socket(context, zmq.PUSH, address)
    started = start_runner(config, tp, run_dir, outbox, shows_start=shows_start)
    outbox.close(linger=500)
    if started is not None:
        freeze_heap()
        runner, sender = started[0], EventSender(context, run_dir)
        runner.memory.watch_owner(turn.note_owner)
        served = runner.served_weights()
        updater = WeightUpdater(served, sender.send)
        if runner.memory.generations is not None:
            runner.memory.generations.watch(lambda *_: None)  # rank 0 tells the others
        mover = None
        if config.role != "both":
            mover, rank_address = make_mover(config, runner, run_dir, sender.send)
            sender.send(RankJoined(rank=tp.rank, address=rank_address))
        memory = _released_memory(runner, served, sender)
        profiler = None if config.profile_dir is None else RankProfiler(runner, sender.send)
        with watched(runner.device, partial(_tell_compiled, sender, tp.rank)):
            follow(runner, updater, messages, sender.send, turn, mover, memory, profiler)


def _tell_change(sender: EventSender, number: int, version: str, model_path: str | None) -> None:
    """Tell the loop that another engine has changed the weights, which the engines share."""
    sender.send(WeightsChanged(generation=number, version=version, model_path=model_path))


def _tell_compiled(sender: EventSender, rank: int, found: Compilations) -> None:
    """Tell the loop that a kernel was compiled behind the start."""
    sender.send(KernelsCompiled(rank, found.compiled, found.loaded))


def _released_memory(
    runner: ModelRunner, served: ServedWeights, sender: EventSender
) -> ReleasedMemory | None:
    """Return what releases the memory of a rank; None: it was not made for that."""
    if not isinstance(runner.memory, ReleasableMemory):
        return None
    return ReleasedMemory(runner.memory, runner.model, served, runner.submit_long, sender.send)


def _watch_lifeline() -> None:
    """End this process once standard input (descriptor 0) closes: the frontend closes it, or has ended."""
    while os.read(0, 1024):
        pass
    os._exit(0)


def _prepare_device(rank: int) -> None:
    """Import the kernels while a thread has the driver make the context of the device, which takes as long.

    Each is done again where it is needed, and so is an error.
    """

    def make_context() -> None:
        with suppress(Exception):
            torch.cuda.synchronize(rank)  # allocates nothing

    threading.Thread(target=make_context, name="segue-context", daemon=True).start()
    with suppress(Exception):
        import_kernels()


def main(spec: dict[str, Any]) -> None:
    """What a worker process does, as ``spec`` says; returns once it has been told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the frontend decides
    end_with_parent()
    if os.getppid() != spec["parent"]:  # it ended before the kernel knew that this process must end with it
        os._exit(0)
    config = EngineConfig(**spec["config"])
    tp, run_dir = TPInfo(rank=spec["rank"], size=spec["size"]), Path(spec["run_dir"])
    if config.device != "cpu":
        compilations.start_processes(tp.size)  # before there is a thread
    threading.Thread(target=_watch_lifeline, name="lifeline", daemon=True).start()
    if config.device != "cpu" and can_compile():
        _prepare_device(tp.rank)
    configure(config.log_level, config.log_format, rank=tp.rank if tp.size > 1 else None)
    shows_start = spec["shows_start"]
    addresses = (f"ipc://{run_dir}/to_scheduler", f"ipc://{run_dir}/to_frontend")
    context: zmq.Context[Any] = zmq.Context()
    try:
        with send_heartbeats(context, addresses[1], tp.rank, config.ping_s) as turn:
            if tp.rank == 0:
                run_scheduler(
                    config, run_dir, addresses, context, size=tp.size, shows_start=shows_start, turn=turn
                )
            else:
                _run_follower(config, tp, run_dir, addresses[1], context, turn, shows_start=shows_start)
    except Exception:
        if run_dir.exists():
            raise
        os._exit(0)  # the frontend has given up, and has removed the files
    context.term()
