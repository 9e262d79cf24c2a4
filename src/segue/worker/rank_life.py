"""What a rank does for the life of its engine: it answers pings, and it wakes."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from typing import TYPE_CHECKING

from segue.failover.watchdog import TRACEBACK_S
from segue.logs import logger
from segue.messages.life import EndWake, LifeMessage, PingRanks, RankAnswer, WakeRanks

if TYPE_CHECKING:  # it needs torch
    from segue.model_runner.runner import ModelRunner


class RankLife:
    """One rank's answers. A rank whose wake takes too long is ended by a thread that needs no GIL."""

    def __init__(self, runner: ModelRunner, send: Callable[[RankAnswer], None]) -> None:
        self._runner = runner
        self._send = send

    def handle(self, message: LifeMessage) -> None:
        """Do what a message asks for, and answer it."""
        match message:
            case PingRanks():
                if message.is_deep:
                    self._runner.deep_ping()
                self._send(RankAnswer(message.call, self._runner.tp.rank))
            case WakeRanks():
                if message.timeout_s:
                    faulthandler.dump_traceback_later(message.timeout_s + TRACEBACK_S, exit=True)
                self._send(self._wake(message))
            case EndWake():
                faulthandler.cancel_dump_traceback_later()

    def _wake(self, message: WakeRanks) -> RankAnswer:
        """Wake the runner; returns the answer."""
        rank = self._runner.tp.rank
        try:
            held = self._runner.wake(message.epoch, message.timeout_s)
        except Exception as error:
            logger.exception("rank %d cannot wake", rank)
            return RankAnswer(message.call, rank, error=f"{type(error).__name__}: {error}")
        return RankAnswer(message.call, rank, kv=held)
