"""Receives one session's broadcasts, in the manifest's order, and gives the tensors to a sink.

One thread receives; it blocks in a receive, or while a communicator is built. A second thread watches the
connection to the trainer, and ends the session even if the first thread never returns. Deadlines are kept by
rank 0, which cancels the session (`control/session.py`).
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

import torch

from segue.messages.weight_operations import Manifest
from segue.weight_update.transport.base import ReceiveSpec, Sink, plan
from segue.weight_update.transport.gloo import GlooReceive
from segue.weight_update.transport.group import FOREVER, JoinedGroup
from segue.weight_update.transport.nccl import NcclReceive
from segue.weight_update.transport.pace import ReceivePace

_RELEASE_POLL_S = 0.02
_LINK_POLL_S = 0.2
_LINK_GRACE_S = 0.5  # after the trainer's end is noticed, bytes that it sent may still arrive for so long


class _SessionEnded(Exception):
    """Ends the receiving thread: the session was ended by another thread."""


@dataclass(eq=False)
class Receiver:
    """Receives one session; begins in its constructor.

    The callbacks are called from its threads, or from the caller of `end`; they must not block.
    """

    group: JoinedGroup
    manifest: Manifest
    sink: Sink | None  # stores the tensors; None: they are dropped, as with ``manifest.discard``
    _: KW_ONLY
    on_ready: Callable[[], None]  # once the trainer may broadcast
    on_progress: Callable[[int, int], None]  # after the first broadcast and each bucket: buckets and bytes
    on_done: Callable[[str | None], None]  # once, as the last one, with the error if there is one
    # After this time gloo gives up a receive; it is later than all deadlines.
    gloo_timeout_s: float = FOREVER.total_seconds()
    pace: ReceivePace | None = None  # over NCCL; None: as fast as the trainer sends

    def __post_init__(self) -> None:
        self.idle = threading.Event()  # set once no memory is touched any more, the sink's included
        self._changed = threading.Condition()
        self._transport: GlooReceive | NcclReceive | None = None
        self._has_ended = False
        self._is_ready = False
        self._has_begun = False  # the first broadcast was received
        self._is_busy = False  # storing a broadcast
        self._stored_at = time.monotonic()  # when the last broadcast was stored; the present while one is
        self._num_buckets = 0
        self._num_bytes = 0
        threads = [
            threading.Thread(target=self._receive, name="receive-weights", daemon=True),
            threading.Thread(target=self._watch, name="receive-weights-watch", daemon=True),
        ]
        self.group.set_receiver(threads, self.idle)
        for thread in threads:
            thread.start()

    def end(self, error: str | None = "cancelled") -> None:
        """End the session now, unless it has ended; `idle` is set once its memory is free.

        With an error the group is dead afterwards if a receive may have been posted: a posted receive cannot
        be withdrawn.
        """
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            self._changed.notify()
        if error is not None and self._is_ready:
            self.group.mark_dead(error)
        self.on_done(error)

    def check(self) -> None:
        """Raise if the session has ended."""
        if self._has_ended:
            raise _SessionEnded

    def ready(self) -> None:
        """Tell the caller that the trainer may broadcast."""
        with self._changed:
            self._is_ready = True
            if not self._has_ended:
                self.on_ready()

    def received(self, broadcast: ReceiveSpec) -> None:
        """Count a received broadcast, and report the first one."""
        self._is_busy = True
        self._num_bytes += broadcast.num_bytes
        if not self._has_begun:
            self._has_begun = True
            self._report_progress(self._num_buckets)

    def stored(self, broadcast: ReceiveSpec) -> None:
        """Count the buckets that are stored, including empty ones before them."""
        self._stored_at = time.monotonic()
        self._is_busy = False
        if broadcast.num_buckets > self._num_buckets:
            self._report_progress(broadcast.num_buckets)

    def _report_progress(self, num_buckets: int) -> None:
        """Report progress, unless the session has ended: after `on_done` nothing is reported."""
        with self._changed:
            self._num_buckets = num_buckets
            if not self._has_ended:
                self.on_progress(num_buckets, self._num_bytes)

    def _receive(self) -> None:
        """The receiving thread: receives all broadcasts, and ends the session, with the error if any."""
        group, manifest = self.group, self.manifest
        sink = None if manifest.discard else self.sink
        try:
            broadcasts = plan(manifest, sink, group.device)
            if not broadcasts:
                self.ready()
            elif group.device.type == "cuda":
                torch.cuda.set_device(group.device)
                registered = manifest.flattened and group.registers
                self._transport = NcclReceive(group, broadcasts, sink, registered=registered, pace=self.pace)
            else:
                self._transport = GlooReceive(group, broadcasts, sink, timedelta(seconds=self.gloo_timeout_s))
            if self._transport is not None:
                self._transport.receive(self)
            group.num_buckets += len(manifest.buckets)
            if self._num_buckets < len(manifest.buckets):  # empty buckets at the end
                self._report_progress(len(manifest.buckets))
            self.end(None)
        except _SessionEnded:
            pass
        except Exception as error:
            self.end(_explain(error, self.group))
        finally:
            if self._transport is not None:
                self._transport.wait_idle()
            self.idle.set()

    def _watch(self) -> None:
        """End the session once the trainer is gone. Then free the buffers if the other thread only waits."""
        # NCCL does not notice that its peer has gone; nor does gloo in the middle of a message. The session
        # goes on for `_LINK_GRACE_S` after the loss and after each stored broadcast: more may have arrived.
        lost_at = math.inf  # when the connection to the trainer's store was found closed
        with self._changed:
            while not self._has_ended and time.monotonic() < max(lost_at, self._stored_at) + _LINK_GRACE_S:
                self._changed.wait(_LINK_POLL_S)
                if self._is_busy:
                    self._stored_at = time.monotonic()
                if lost_at == math.inf and not self.group.connected:
                    lost_at = time.monotonic()
        self.end("the connection to the trainer was lost: its store is closed")
        pause_s = _RELEASE_POLL_S
        while not self.idle.wait(pause_s):
            pause_s = min(2 * pause_s, 1.0)
            if self.group.is_closed and self._transport is not None and self._transport.try_release():
                self.idle.set()


def _explain(error: Exception, group: JoinedGroup) -> str:
    """Returns an error of torch, NCCL or gloo as a text for the client, with a remedy if one is known."""
    text = str(error).strip()
    if "Duplicate GPU" in text or "ncclInvalidUsage" in text:
        return (
            f"NCCL cannot connect two processes on one GPU, and the trainer seems to be on {group.device} "
            "too: give the trainer another GPU, or use update_weights_from_tensor (CUDA IPC) or a group with "
            f"backend 'gloo'. NCCL's message: {text.splitlines()[-1]}"
        )
    # gloo puts its source position in front of the message, and advice behind it.
    text = re.sub(r"^\[\S+:\d+\] ", "", text.partition("\n")[0]).partition(". ")[0] or repr(error)
    if "Connection" in text or not group.connected:
        return f"the connection to the trainer was lost: {text}"
    return text
