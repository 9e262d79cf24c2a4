"""Sends a model's weights to engines that keep serving: all engines commit the new weights, or none does."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, NoReturn
from urllib.parse import urlsplit

import torch
from msgspec import structs

from segue.errors import ConfigError, SegueError
from segue.listener import own_address
from segue.messages import weight_operations as operations
from segue.messages.weight_operations import Operation
from segue.trainer.buckets import TensorBucket, Weights, device_of, plan, tensors
from segue.trainer.endpoint import Answer, Endpoint, everywhere
from segue.trainer.group import BroadcastSender, TrainerGroup, listen_at
from segue.weight_update.checksum import checksum
from segue.weight_update.transport.rendezvous import bracketed

ASK_S = 10.0  # timeout of requests that an engine answers at once
POLL_S = 0.2  # between two checks of the engines' status during a broadcast
COMMIT_TRIES = 3  # requests for a commit, if answers are lost


class WeightSendError(SegueError):
    """The weights were not sent; unless the message says otherwise, no engine has committed them.

    An engine whose answer to a complete or a commit is missing may have committed them all the same.
    ``answers`` has the last answer of each engine.
    """

    def __init__(self, message: str, answers: Sequence[Answer] = ()) -> None:
        super().__init__(message)
        self.answers = list(answers)


class _RefusedError(WeightSendError):
    """An engine refused the prepare request; nothing was broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a :meth:`WeightSender.send`: buckets and bytes that are sent, and not yet committed."""

    num_buckets: int
    total_buckets: int
    num_bytes: int
    total_bytes: int
    seconds: float  # since prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """The result of a :meth:`WeightSender.send`."""

    num_buckets: int
    bytes: int  # broadcast; counted once for any number of engines
    seconds: float  # from prepare to commit, without joining the group
    broadcast_seconds: float
    gb_per_s: float  # bytes / seconds / 1e9
    endpoints: list[Answer]  # each engine's answer to the commit; `fields` has its weight_version


@dataclass(eq=False, repr=False)
class WeightSender:
    """Sends the weights of a model, or of a state dict, to engines; keeps a process group with them.

    The group is joined at the first :meth:`send`, and again after a failure. In a distributed trainer, one
    rank makes a sender, with weights that are whole on it. Any thread may call it; one call runs at a time.

    Args:
        endpoints: the engines' URLs, in the order of their ranks; :class:`Endpoint` for one with a key. Or
            the URL of a router, which is asked for its engines at each send.
        weights: a module, whose parameters are sent, or a mapping, which is sent as it is.
        buffer_size_mb: MiB per bucket; a larger tensor has its own bucket.
        flattened: one broadcast per bucket; else one per tensor.
        checksums: let engines compare a checksum of each tensor before they commit.
        backend: auto: NCCL for weights on CUDA, else gloo.
        group_name: of the process group.
        master_address: at which engines reach this process; default: found from the first engine's URL.
        master_port: of the store that is hosted here; default, or if it is in use: a free port.
        max_ctas: the most SMs that NCCL's kernels use, here and in each engine; None: NCCL's default.
        gb_per_s_while_serving: the speed limit over NCCL while an engine generates. A lower limit slows
            the engine's requests down less, but for longer. A bucket must take much less than
            ``timeout_s`` at this speed. ``math.inf``: no limit.
        timeout_s: for joining, for a transfer without progress, and for engines to finish receiving.
        on_progress: called after each bucket, in another thread.

    Raises:
        ConfigError: ``endpoints`` is empty, or ``gb_per_s_while_serving`` is not above 0.
    """

    endpoints: str | Endpoint | Sequence[str | Endpoint]
    weights: Weights
    _: KW_ONLY
    buffer_size_mb: float = 1024
    flattened: bool = True
    checksums: bool = False
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    group_name: str = operations.DEFAULT_GROUP
    master_address: str | None = None
    master_port: int | None = None
    max_ctas: int | None = 16
    gb_per_s_while_serving: float = 25.0
    timeout_s: float = 300.0
    on_progress: Callable[[Progress], None] = lambda progress: None

    def __post_init__(self) -> None:
        given = [self.endpoints] if isinstance(self.endpoints, str | Endpoint) else self.endpoints
        self._engines = [Endpoint(url=each) if isinstance(each, str) else each for each in given]
        # A URL that is not in a list may be a router's.
        self._router = self._engines[0] if given is not self.endpoints else None
        if not self._engines:
            raise ConfigError("endpoints is empty: give the URL of at least one engine")
        limit = self.gb_per_s_while_serving
        if not limit > 0:
            raise ConfigError(f"gb_per_s_while_serving={limit}; it must be above 0 (math.inf: no limit)")
        self._group: TrainerGroup | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, weight_version: str | None = None, *, flush_cache: bool = False) -> SendReport:
        """Send the current weights, which must not change until this returns.

        The engines' new weight version is ``weight_version``; None: a number one higher than before.

        Raises:
            WeightSendError: an engine cannot be reached, refused, or failed; the old weights stay.
        """
        with self._lock:
            if self._group is not None:
                with suppress(_RefusedError):  # an engine that was restarted does not know the group
                    return self._attempt(weight_version, flush_cache)
            return self._attempt(weight_version, flush_cache)

    def close(self) -> None:
        """Leave the group, and let the engines leave it; a running :meth:`send` fails.

        A later :meth:`send` joins a group again.
        """
        self._closing.set()
        with self._lock:
            self._closing.clear()
            self._leave()

    def _attempt(self, weight_version: str | None, flush_cache: bool) -> SendReport:
        """Send once; after a failure no session and no group is left, so that the next send begins afresh."""
        session = uuid.uuid4().hex
        try:
            self._look_up()
            return self._send(session, weight_version, flush_cache)
        except BaseException:
            self._give_up(session)
            raise

    def _look_up(self) -> None:
        """Ask the router, if there is one, for its engines; a group with other engines is left."""
        if self._router is None:
            return
        engines = self._router.engines(ASK_S)
        if not engines:
            text = f"the router {self._router.url} has no engines; its /workers lists them"
            raise WeightSendError(text)
        if engines != self._engines:
            self._leave()
            self._engines = engines

    def _send(self, session: str, weight_version: str | None, flush_cache: bool) -> SendReport:
        """Do one update: join if needed, prepare all engines, broadcast, complete and commit.

        Several engines commit in a request of its own, once all have received and checked everything: so all
        commit or none does. A single engine commits with the complete request.
        """
        self._check_open()
        buckets = plan(self.weights, int(self.buffer_size_mb * (1 << 20)))
        group = self._group = self._group or self._join()
        began = time.perf_counter()
        sums = {name: checksum(each) for name, each in tensors(self.weights)} if self.checksums else None
        prepare = operations.Prepare(
            buckets=[bucket.announced for bucket in buckets],
            group_name=self.group_name,
            num_buckets=len(buckets),
            session_id=session,
            weight_version=weight_version,
            load_format="flattened_bucket" if self.flattened else None,
            checksums=sums,
            timeout_s=self.timeout_s,
        )
        try:
            answers = self._ask(prepare, self.timeout_s)
        except WeightSendError as error:
            raise _RefusedError(error.message, error.answers) from None
        try:
            group.wait(self.timeout_s, self._check_open)
        except (RuntimeError, TimeoutError) as error:
            raise WeightSendError(str(error)) from error
        broadcast_began = time.perf_counter()
        self._broadcast(group, session, buckets, began, self._speed_limit(answers))
        broadcast_s = time.perf_counter() - broadcast_began
        alone = len(self._engines) == 1
        complete = operations.Complete(
            group_name=self.group_name, session_id=session, flush_cache=flush_cache, commit=alone
        )
        answers = self._ask(complete, self.timeout_s + ASK_S, COMMIT_TRIES)
        if not alone:
            commit = operations.CommitSession(session_id=session, flush_cache=flush_cache)
            answers = self._ask(commit, self.timeout_s + ASK_S, COMMIT_TRIES)
        seconds = time.perf_counter() - began
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        return SendReport(
            num_buckets=len(buckets),
            bytes=num_bytes,
            seconds=seconds,
            broadcast_seconds=broadcast_s,
            gb_per_s=num_bytes / seconds / 1e9,
            endpoints=answers,
        )

    def _join(self) -> TrainerGroup:
        """Host a group for all engines; returns it once all engines have answered that they joined."""
        sizes = world_sizes(self._engines)
        device = device_of(self.weights)
        if self.backend == "gloo" or (self.backend == "auto" and device.type != "cuda"):
            device = torch.device("cpu")
        elif device.type != "cuda":
            raise WeightSendError(
                f"backend 'nccl' sends from CUDA devices, but the weights are on {device}: use 'gloo'"
            )
        first = urlsplit(self._engines[0].url)  # all engines get the address that suits this one
        address = self.master_address or own_address(first.hostname or "", first.port or 80)
        listener = listen_at(self.master_port)
        try:
            join = operations.JoinGroup(
                master_address=bracketed(address),
                master_port=listener.getsockname()[1],
                rank_offset=0,
                world_size=1 + sum(sizes),
                group_name=self.group_name,
                backend="nccl" if device.type == "cuda" else "gloo",
                timeout_s=self.timeout_s,
            )
            hosted = TrainerGroup(join.group, device, self.timeout_s, self.max_ctas, listener)
        except BaseException:
            listener.close()
            raise

        def ask(index: int, engine: Endpoint) -> Answer:
            rank_offset = 1 + sum(sizes[:index])
            return engine.post(structs.replace(join, rank_offset=rank_offset), self.timeout_s + ASK_S)

        try:
            # Once one engine refuses, the group is left, which ends the rendezvous of the others.
            answers = everywhere(self._engines, ask, on_failure=hosted.leave, stop=self._closing)
            self._check(join, answers)
            hosted.has_met.wait(self.timeout_s)
        except BaseException:
            hosted.leave()
            raise
        return hosted

    def _check_open(self) -> None:
        """Raise if `close` was called."""
        if self._closing.is_set():
            raise WeightSendError("the sender was closed during the send")

    def _speed_limit(self, answers: list[Answer]) -> float:
        """Returns the speed limit in GB/s for engines with these answers."""
        is_serving = any(answer.fields.get("generating") for answer in answers)
        return self.gb_per_s_while_serving if is_serving else math.inf

    def _broadcast(
        self, group: TrainerGroup, session: str, buckets: list[TensorBucket], began: float, gb_per_s: float
    ) -> None:
        """Broadcast all buckets, and watch the engines meanwhile; ``began``: when the update began."""
        total_bytes = sum(bucket.num_bytes for bucket in buckets)

        def report(broadcast: BroadcastSender) -> None:
            self.on_progress(
                Progress(
                    num_buckets=broadcast.num_buckets,
                    total_buckets=len(buckets),
                    num_bytes=broadcast.num_bytes,
                    total_bytes=total_bytes,
                    seconds=time.perf_counter() - began,
                )
            )

        source = device_of(self.weights)
        if source.type == "cuda" and group.device.type == "cpu":  # the stream of another thread reads them
            torch.cuda.current_stream(source).synchronize()
        broadcast = BroadcastSender(
            group,
            buckets,
            tensors(self.weights),
            flattened=self.flattened,
            on_sent=report,
            gb_per_s=gb_per_s,
        )
        try:
            self._watch(broadcast, session)
        finally:
            broadcast.stop()

    def _watch(self, broadcast: BroadcastSender, session: str) -> None:
        """Wait for the broadcast; raises if it makes no progress, or an engine has ended its session."""
        moved, num_bytes = time.monotonic(), 0
        while not broadcast.finished.wait(POLL_S):
            self._check_open()
            if broadcast.num_bytes > num_bytes:
                moved, num_bytes = time.monotonic(), broadcast.num_bytes
            if time.monotonic() - moved > self.timeout_s:
                self._fail(
                    f"the broadcast made no progress for {self.timeout_s:g} s", self._statuses(session)
                )
            answers = self._statuses(session)
            if not all(answer.success for answer in answers) and not broadcast.finished.is_set():
                self._fail("an engine ended its session during the broadcast", answers)
            # An engine that does not answer may be generating: the limit is raised only if all have answered.
            limit = self._speed_limit(answers)
            if limit < broadcast.gb_per_s or all("generating" in answer.fields for answer in answers):
                broadcast.gb_per_s = limit
        if broadcast.error is not None:
            self._fail(f"the broadcast failed: {broadcast.error}", self._statuses(session))

    def _statuses(self, session: str) -> list[Answer]:
        """Returns each engine's status; an engine that does not answer in time may be busy: a success."""

        def ask(_: int, engine: Endpoint) -> Answer:
            answer = engine.get(operations.GetUpdateStatus.route, ASK_S / 4)
            if answer.gone or "state" not in answer.fields or answer.fields.get("session_id") == session:
                return replace(answer, success=not answer.gone)
            # The engine has ended the session; its answer to a complete request says why.
            complete = operations.Complete(group_name=self.group_name, session_id=session, commit=False)
            return replace(engine.post(complete, ASK_S / 4), success=False)

        return everywhere(self._engines, ask, stop=self._closing)

    def _ask(self, operation: Operation, timeout_s: float, tries: int = 1) -> list[Answer]:
        """Send an operation to all engines, and return their answers; raises unless all are successes."""
        answers = everywhere(
            self._engines,
            lambda _, engine: engine.post(operation, timeout_s, tries=tries),
            stop=self._closing,
        )
        self._check(operation, answers)
        return answers

    def _check(self, operation: Operation, answers: list[Answer]) -> None:
        """Raise with the reasons of the engines that refused ``operation``, if there are any."""
        done = [answer.url for answer in answers if answer.success]
        if isinstance(operation, operations.CommitSession) and 0 < len(done) < len(answers):
            self._fail(f"committed by {', '.join(done)} only, which keep the new weights", answers)
        if len(done) < len(answers):
            self._fail(f"/{operation.route} failed", answers)

    def _fail(self, what: str, answers: list[Answer]) -> NoReturn:
        """Raise an error that names ``what`` failed, and each engine's reason."""
        reasons = "; ".join(f"{answer.url}: {answer.message}" for answer in answers if not answer.success)
        raise WeightSendError(f"{what}: {reasons}" if reasons else what, answers)

    def _give_up(self, session: str) -> None:
        """Abort the session on all engines, and leave the group, in which a broadcast may hang."""
        if self._group is not None:
            abort = operations.AbortSession(session_id=session)
            everywhere(self._engines, lambda _, engine: engine.post(abort, ASK_S))
        self._leave()

    def _leave(self) -> None:
        """Leave the group, if there is one, here and on all engines."""
        group, self._group = self._group, None
        if group is not None:
            leave = operations.LeaveGroup(group_name=self.group_name)
            everywhere(self._engines, lambda _, engine: engine.post(leave, ASK_S))
            group.leave()


def world_sizes(endpoints: Sequence[Endpoint]) -> list[int]:
    """Returns the number of ranks of each engine, from its /server_info, else from its endpoint.

    Raises:
        WeightSendError: an engine cannot be reached, or neither of them has the number.
    """
    answers = everywhere(endpoints, lambda _, endpoint: endpoint.get("server_info", ASK_S))
    sizes: list[int] = []
    for endpoint, answer in zip(endpoints, answers, strict=True):
        size = answer.fields.get("tp", answer.fields.get("tp_size", endpoint.world_size))
        if answer.gone or not isinstance(size, int):
            why = answer.message or "its /server_info has no tp; give the endpoint's world_size"
            raise WeightSendError(f"{answer.url}: its number of ranks is unknown: {why}", answers)
        sizes.append(size)
    return sizes
