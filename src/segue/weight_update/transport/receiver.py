"""Receives one session's broadcasts, in the manifest's order, and hands the tensors to a sink.

What blocks (a receive, a communicator being built) does so in a thread of its own; a second thread looks at
the deadlines and can give the first one up.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from segue.messages.weight_update import Manifest
from segue.weight_update.transport.base import ReceiveSpec, Sink, plan
from segue.weight_update.transport.gloo import GlooReceive
from segue.weight_update.transport.group import FOREVER, JoinedGroup
from segue.weight_update.transport.nccl import NcclReceive

_ABANDON_POLL_S = 0.02
_LINK_POLL_S = 0.2
_LINK_GRACE_S = 0.5  # what was sent may still be on its way when the trainer's end is noticed


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Called from the receiver's threads or that of `Receiver.cancel`; they must not block."""

    entered: Callable[[], None]  # the trainer may broadcast
    progress: Callable[[int, int], None]  # buckets and bytes; first when the first broadcast has landed
    done: Callable[[str | None], None]  # once, and last; with what went wrong


class _Over(Exception):
    """The session has ended for another reason."""


class Receiver:
    """Begins when it is made."""

    def __init__(
        self,
        group: JoinedGroup,
        manifest: Manifest,
        sink: Sink | None,
        callbacks: Callbacks,
        *,
        arm_timeout_s: float = math.inf,
        timeout_s: float = math.inf,
        longest_s: float | None = None,
    ) -> None:
        """``sink``: None, as ``manifest.discard``, drops what comes.

        ``arm_timeout_s``: of silence before the first broadcast has landed, ``timeout_s``: behind it.
        ``longest_s``: after which gloo gives up a broadcast itself; later than any deadline of the session.
        """
        self.quiet = threading.Event()  # no memory, also of the sink, is touched any more
        self._group, self._manifest, self._callbacks = group, manifest, callbacks
        self._sink = None if manifest.discard else sink
        self._longest = FOREVER if longest_s is None else timedelta(seconds=longest_s)
        self._timeouts_s = (arm_timeout_s, timeout_s)
        self._changed = threading.Condition()
        self._wire: GlooReceive | NcclReceive | None = None
        self._over = False
        self._has_entered = False
        self._has_begun = False  # something has landed
        self._is_busy = False  # with what has landed: meanwhile nothing is missed
        self._last = time.monotonic()  # when something came
        self._num_buckets = 0
        self._num_bytes = 0
        threads = [
            threading.Thread(target=self._receive, name="receive-weights", daemon=True),
            threading.Thread(target=self._watch, name="receive-weights-deadline", daemon=True),
        ]
        group.used_by(threads, self.quiet)
        for thread in threads:
            thread.start()

    def cancel(self, reason: str = "cancelled") -> None:
        """End the session now, unless it has ended; ``quiet`` says when its memory is free.

        The group is dead then: what it waits for cannot be taken back.
        """
        self._end(reason)

    def check(self) -> None:
        """Raise if the session is over."""
        if self._over:
            raise _Over

    def entered(self) -> None:
        """Count from here, and say so."""
        self._last = time.monotonic()
        with self._changed:
            self._has_entered = True
            if not self._over:
                self._callbacks.entered()

    def landed(self, broadcast: ReceiveSpec) -> None:
        """Count what was received."""
        self._is_busy = True
        self._num_bytes += broadcast.num_bytes
        if not self._has_begun:
            with self._changed:
                self._has_begun = True
                self._changed.notify()  # another timeout counts from here on
            self._tell(self._num_buckets)

    def taken(self, broadcast: ReceiveSpec) -> None:
        """Count buckets that the sink has, empty ones before them included."""
        self._last = time.monotonic()
        self._is_busy = False
        if broadcast.num_buckets > self._num_buckets:
            self._tell(broadcast.num_buckets)

    def _tell(self, num_buckets: int) -> None:
        with self._changed:
            self._num_buckets = num_buckets
            if not self._over:
                self._callbacks.progress(num_buckets, self._num_bytes)

    def _receive(self) -> None:
        try:
            device = self._group.device
            broadcasts = plan(self._manifest, self._sink, device)
            if not broadcasts:
                self.entered()
            elif device.type == "cuda":
                torch.cuda.set_device(device)
                registered = self._manifest.flattened and self._group.registers
                self._wire = NcclReceive(self._group, broadcasts, self._sink, registered=registered)
            else:
                self._wire = GlooReceive(self._group, broadcasts, self._sink, self._longest)
            if self._wire is not None:
                self._wire.receive(self)
            self._group.num_buckets += len(self._manifest.buckets)
            if self._num_buckets < len(self._manifest.buckets):  # empty ones at the end
                self._tell(len(self._manifest.buckets))
            self._end(None)
        except _Over:
            pass
        except Exception as error:
            self._end(_explain(error, self._group))
        finally:
            if self._wire is not None:
                self._wire.drain()
            self.quiet.set()

    def _watch(self) -> None:
        lost: float | None = None  # when the trainer was missed
        error = ""
        with self._changed:
            while not self._over:
                now = time.monotonic()
                if self._is_busy:
                    self._last = now
                timeout_s = self._timeouts_s[self._has_begun]
                if now >= self._last + timeout_s:
                    error = _silence(self._has_begun, timeout_s)
                    break
                wait_s = self._last + timeout_s - now
                # NCCL does not notice that its peer has gone, nor does gloo in the middle of a message.
                if lost is None and not self._group.connected:
                    lost = now
                if lost is not None and now >= max(lost, self._last) + _LINK_GRACE_S:
                    error = "the connection to the trainer was lost: its store is closed"
                    break
                self._changed.wait(min(wait_s, _LINK_POLL_S))
        self._end(error)
        pause_s = _ABANDON_POLL_S
        while not self.quiet.wait(pause_s):
            pause_s = min(2 * pause_s, 1.0)
            if self._group.is_broken and self._wire is not None and self._wire.abandon():
                self.quiet.set()

    def _end(self, error: str | None) -> None:
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify()
        if error is not None and self._has_entered:
            self._group.mark_dead(error)
        self._callbacks.done(error)


def _silence(has_begun: bool, timeout_s: float) -> str:
    if has_begun:
        return f"nothing came for {timeout_s:g} s (timeout_s), in the middle of the update"
    return f"nothing came within {timeout_s:g} s (arm_timeout_s)"


def _explain(error: Exception, group: JoinedGroup) -> str:
    text = str(error).strip()
    if "Duplicate GPU" in text or "ncclInvalidUsage" in text:
        return (
            f"NCCL cannot connect two processes on one GPU, and the trainer seems to be on {group.device} "
            "too: give it another one, or use update_weights_from_tensor (CUDA IPC) or a group with backend "
            f"'gloo'. NCCL said: {text.splitlines()[-1]}"
        )
    # gloo puts a place in its source in front, and advice behind.
    text = re.sub(r"^\[\S+:\d+\] ", "", text.partition("\n")[0]).partition(". ")[0] or repr(error)
    if "Connection" in text or not group.connected:
        return f"the connection to the trainer was lost: {text}"
    return text
