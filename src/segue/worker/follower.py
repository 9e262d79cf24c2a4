"""The loop of the ranks other than 0: they do what rank 0 sends them, in order, and decide nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from segue.heartbeat import Turn
from segue.messages.kv import BanWriters, ConnectPeer, DisconnectPeer, PreparePages, PushPages
from segue.messages.life import EndWake, PingRanks, WakeRanks
from segue.messages.memory import MapMemory, UnmapMemory
from segue.messages.profile import BeginTrace, EndTrace
from segue.messages.steps import Drain, Drained, RankEvent, RankMessage, StepPlan
from segue.worker.loop import OVERLAP_DEPTH
from segue.worker.rank_life import RankLife

if TYPE_CHECKING:  # these need torch, which the loop does not
    from segue.disagg.mover import Mover
    from segue.model_runner.executor import ForwardOutput
    from segue.model_runner.runner import ModelRunner
    from segue.weight_update.rank import WeightUpdater
    from segue.worker.profiling import RankProfiler
    from segue.worker.released_memory import ReleasedMemory


def follow(
    runner: ModelRunner,
    updater: WeightUpdater,
    messages: zmq.Socket[bytes],
    send: Callable[[RankEvent], None],
    turn: Turn,
    mover: Mover | None = None,
    memory: ReleasedMemory | None = None,
    profiler: RankProfiler | None = None,
) -> None:
    """Run every plan in order, with at most ``OVERLAP_DEPTH`` steps in flight.

    It reads ``messages`` from rank 0 and answers through ``send``; results of steps are only awaited, because
    rank 0 has the same tokens. It never returns: the process ends with its lifeline (see `worker.main`).
    """
    decode = msgspec.msgpack.Decoder(RankMessage).decode
    in_flight: deque[ForwardOutput] = deque()
    life = RankLife(runner, send)
    while True:
        turn.rest()
        frame = messages.recv()
        turn.begin()
        match message := decode(frame):
            case StepPlan():
                in_flight.append(runner.forward_batch(message))
                if len(in_flight) == OVERLAP_DEPTH:
                    in_flight.popleft().result()
            case Drain():
                while in_flight:
                    in_flight.popleft().result()
                send(Drained())
            case PingRanks() | WakeRanks() | EndWake():
                life.handle(message)
            case ConnectPeer() | DisconnectPeer() | PushPages() | PreparePages() | BanWriters():
                assert mover is not None, "KV is handed over although --role is both"
                mover.handle(message)
            case UnmapMemory() | MapMemory():
                assert memory is not None, "memory is released without --enable-memory-saver"
                memory.handle(message)
            case BeginTrace() | EndTrace():
                assert profiler is not None, "a profile was asked for without --profile-dir"
                profiler.handle(message)
            case _:
                updater.handle(message)
