"""One running engine, from start to shutdown: its workers, sockets and tokenizer manager."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from segue.bootstrap_hosts import BootstrapHosts
from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.errors import (
    ConfigError,
    EngineDeadError,
    EngineHungError,
    EngineStartError,
    MemoryServiceLostError,
    SegueError,
    error_of,
)
from segue.failover.control_note import ControlNotes
from segue.failover.life import Life, LifeState
from segue.frontend.call_trace import EngineTracing
from segue.frontend.control_log import EngineLog
from segue.frontend.life import WorkerHealth
from segue.frontend.tokenizer import ServedModel, chat_form
from segue.frontend.tokenizer_manager import TokenizerManager
from segue.launch.channel import Channel
from segue.launch.in_thread import in_thread
from segue.launch.model_setup import find_model, load_tokenizer, names_of, sampling_defaults
from segue.launch.processes import WORKER_COMMAND, EmbeddedScheduler, WorkerProcesses, touched_bytes
from segue.launch.rank_calls import RankCalls
from segue.launch.run_dir import RunDir
from segue.launch.shared_weights import check_shared_weights
from segue.logs import logger
from segue.messages.control import (
    Heartbeat,
    PauseMode,
    PauseResult,
    Ready,
    SchedulerMessage,
    Shutdown,
    StartFailed,
    StartStep,
    WorkerMessage,
)
from segue.messages.life import RankAnswer
from segue.models.sharding import check_tp_size
from segue.tracing.opening import tracer_of

SHUTDOWN_MESSAGE = "the engine is shutting down"  # of requests that a shutdown aborts
ABORT_S = 0.7  # that aborted requests have to end at a shutdown
STOP_S = 0.8  # that workers have to end before they are killed
LOADING_POLL_S = 1.0  # between two looks whether the workers get on with their start
LOADED_BYTES = 1 << 20  # that they must have read or written in order to count as getting on
LAST_MESSAGE_S = 0.3  # most time between a worker's exit and the arrival of its last message


def check_options(config: EngineConfig, *, embedded: bool) -> None:
    """Refuse options that contradict each other, whatever the model and the machine are.

    Raises:
        ConfigError: they do; the text names the options.
    """
    if embedded and config.tp != 1:
        raise ConfigError(
            f"tp={config.tp}: an embedded engine has one rank; use tp=1 or embedded=False", param="tp"
        )
    if config.enable_memory_saver and config.role != "both":
        raise ConfigError(
            f"enable_memory_saver=True with role={config.role!r}: other engines write to this engine's "
            "KV cache, so it cannot be released; use role='both'",
            param="enable_memory_saver",
        )
    check_shared_weights(config, embedded=embedded)


class Runtime:
    """One running engine, made by :meth:`start`. It lives on the event loop that made it."""

    served_model: ServedModel  # what is needed to make requests of a client's body, once the engine is ready

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        *,
        embedded: bool,
        command: Sequence[str],
        life: Life | None = None,
        on_start: Callable[[StartStep | None], None] | None = None,
    ) -> None:
        """Open the sockets to the workers, which :meth:`start` then starts.

        ``life`` is the engine's, if somebody else wants to know it from the beginning. ``embedded`` runs the
        scheduler in this process, and ``command`` starts a worker process. ``on_start`` is called with each
        step of rank 0's start when it begins, and while it loads weights; at last with None.
        """
        loop = asyncio.get_running_loop()
        self.config = config
        self.source = source
        self.names = names_of(config, source)  # of the model, as clients see them
        self.name = self.names[0]  # which replies have
        self.life = life or Life()
        self.log = EngineLog()  # of what is done to the engine, and of its states
        self.started_at = int(time.time())  # seconds since the epoch
        self.incarnation = uuid.uuid4().hex  # another one for every start: routers tell them apart by it
        tracer = tracer_of(config.otlp_traces_endpoint, "segue", self.incarnation)
        self.tracing = None if tracer is None else EngineTracing(tracer, self.name)
        self.epoch = (
            0  # grows whenever another engine takes over in a cohort; 0: this one is in none, or asleep
        )
        self.control_notes: ControlNotes | None = None  # in a cohort: for the engine that takes over
        self.died: asyncio.Future[SegueError] = loop.create_future()  # why the engine has ended by itself
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._manager: TokenizerManager | None = None
        self._vitals: WorkerHealth | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._is_shut_down = False
        self._without_owner: set[int] = set()  # ranks that have lost the memory service
        self._context: zmq.Context[Any] = zmq.Context()
        run_dir = RunDir()
        self._workers: WorkerProcesses | EmbeddedScheduler
        if embedded:
            self._workers = EmbeddedScheduler(config, run_dir, self._context)
        else:
            shows_start = on_start is not None
            self._workers = WorkerProcesses(config, run_dir, command, shows_start=shows_start)
        self._channel = Channel(self._context, *self._workers.addresses, self._receive, self._on_error)
        self._early: list[SchedulerMessage] = []  # that came before there was a manager
        self._channel.on_output = self._early.append
        self._on_start = on_start
        self._ranks = RankCalls(config.tp, self._channel.send)
        self._loop = loop

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        embedded: bool = False,
        command: Sequence[str] = WORKER_COMMAND,
        life: Life | None = None,
        on_start: Callable[[StartStep | None], None] | None = None,
    ) -> Runtime:
        """Resolve the model, start the workers, and wait until they are ready: then the engine stands by.

        ``on_start`` is told how the start gets on, and shows it. The engine serves once it was woken by
        :meth:`begin_wake`, :meth:`wake_ranks` and :meth:`activate`.

        Raises:
            SegueError: the model's files are wrong, or a worker could not start.
            ConfigError: the options contradict each other; no worker is started.
            TensorParallelError: the model cannot be split into ``tp`` shards; no worker is started.
            EngineStartError: a worker ended before it was ready.
        """
        check_options(config, embedded=embedded)
        source = await in_thread(partial(find_model, config))
        check_tp_size(source.config, config.tp)
        runtime = cls(config, source, embedded=embedded, command=command, life=life, on_start=on_start)
        try:
            runtime._workers.start(runtime._on_exit)
            if config.live_during_init == "progress":
                runtime._watch(runtime._note_loading())
            tokenizer = await in_thread(partial(load_tokenizer, config, source))
            ready = await runtime._ready
            runtime._manager = TokenizerManager(
                tokenizer,
                ready,
                runtime._channel.send,
                source.eos_token_ids,
                life=runtime.life,
                log=runtime.log,
                tracing=runtime.tracing,
                max_queued_requests=config.max_queued_requests,
                max_logprobs=config.max_logprobs,
                bootstrap_hosts=BootstrapHosts(config.disaggregation_bootstrap_hosts, config.host),
                bootstrap_port=config.disaggregation_bootstrap_port,
            )
            runtime._channel.on_output = runtime._manager.receive
            for message in runtime._early:
                runtime._manager.receive(message)
            runtime.served_model = ServedModel(
                names=[*runtime.names, *([] if config.model is None else [config.model])],
                max_prompts=config.max_queued_requests,
                encoder=runtime._manager.encoder,
                chat=chat_form(tokenizer, config.tool_call_parser, config.reasoning_parser),
                sampling_defaults=sampling_defaults(config, source, runtime._manager.encoder.limits),
            )
            if runtime.life.error is not None:  # a worker has ended since it was ready
                raise EngineStartError(runtime.life.error.message)
            runtime._enter(LifeState.STANDBY)
            if not embedded:  # an embedded scheduler is part of this process, and is not watched
                runtime._watch(runtime._check_workers_forever())
                if config.probed_port is not None:
                    runtime._watch(
                        runtime._ranks.ping_forever(lambda: runtime.life.state is LifeState.STANDBY)
                    )
        except BaseException:
            await runtime.shutdown()
            raise
        return runtime

    @classmethod
    async def start_active(
        cls, config: EngineConfig, *, embedded: bool = False, command: Sequence[str] = WORKER_COMMAND
    ) -> Runtime:
        """Start an engine that serves at once, without a server.

        Raises:
            SegueError: as :meth:`start`.
        """
        if config.shadow_mode:
            raise ConfigError(
                "shadow_mode=True: an engine without a server ends with its program, so it cannot stand by; "
                "use segue serve --shadow-mode",
                param="shadow_mode",
            )
        runtime = await cls.start(config, embedded=embedded, command=command)
        try:
            runtime.begin_wake()
            await runtime.wake_ranks(epoch=0)
            runtime.activate()
        except BaseException:
            await runtime.shutdown()
            raise
        return runtime

    def begin_wake(self, within_s: float | None = None) -> None:
        """Leave STANDBY, in order to serve within so many seconds; None: there is no limit."""
        self._enter(LifeState.WAKING, within_s=within_s)

    async def wake_ranks(self, epoch: int, timeout_s: float = 0.0) -> None:
        """Serve under this epoch from now on, and have every rank take its memory.

        A rank that was not told of the end of the wake within ``timeout_s`` seconds ends itself; 0: never.

        Raises:
            SegueError: a rank cannot wake, or the engine has ended.
        """
        self.epoch = epoch
        await self._ranks.wake(timeout_s, epoch)

    def activate(self) -> None:
        """End the wake: the engine serves."""
        self._enter(LifeState.ACTIVE)
        self._ranks.end_wake()

    async def pause_generation(self, mode: PauseMode, ttl_s: float | None = None) -> PauseResult:
        """Stop generation, as the tokenizer manager does, and note it for an engine that takes over."""
        began = time.monotonic()
        result = await self.manager.pause_generation(mode, ttl_s)
        if self.control_notes is not None and result.mode is not None:
            left_s = None if ttl_s is None else ttl_s - (time.monotonic() - began)
            self.control_notes.put(self.epoch, result.mode, left_s)
        return result

    async def continue_generation(self) -> None:
        """Continue generation; an engine that takes over generates too."""
        await self.manager.calls.continue_generation()
        if self.control_notes is not None:
            self.control_notes.remove(self.epoch)

    @property
    def manager(self) -> TokenizerManager:
        """The tokenizer manager, which takes requests. Available once the engine is ready."""
        assert self._manager is not None, "the engine is not ready"
        return self._manager

    @property
    def trouble(self) -> SegueError | None:
        """Why no request can be served now; None: requests can be served. Sends no message to a worker."""
        self._check_workers()
        return self.manager.trouble

    @property
    def is_hung(self) -> bool:
        """Whether the engine counts as hung."""
        self._check_workers()
        return self.life.hung is not None

    @property
    def silent_s(self) -> float:
        """The seconds since the last answer of the rank that has been silent for longest."""
        return self._ranks.silent_s

    @property
    def owner_lost(self) -> bool:
        """Whether a rank has no session with the memory service that has its memory."""
        return bool(self._without_owner)

    @property
    def heartbeat_ages(self) -> list[float]:
        """The seconds since each worker's last heartbeat, by rank; empty if embedded."""
        return self._vitals.ages(time.monotonic()) if self._vitals is not None else []

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers, by rank; empty if embedded."""
        return self._workers.pids

    async def shutdown(self) -> None:
        """End the requests in flight with their output so far, then the workers. May be called again."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for task in self._watching:
            task.cancel()
        await self.end_requests()
        # Workers of an engine that has failed, or never was ready, are not waited for.
        polite_s = STOP_S / 2 if self._manager is not None and self.life.error is None else 0.0
        self._end(EngineDeadError("the engine was shut down"))
        closing = None if self.tracing is None else asyncio.ensure_future(in_thread(self.tracing.close))
        if not self._ready.cancel() and not self._ready.cancelled():  # it has a result, or an exception
            self._ready.exception()  # mark the exception as retrieved: asyncio would log it
        self._channel.send(Shutdown())
        ended = await self._workers.stop(polite_s, STOP_S)
        self._channel.close()
        if ended:  # else a scheduler thread holds sockets, and this call would wait for it
            self._context.term()
        if closing is not None:
            await closing

    def fail(self, error: SegueError) -> None:
        """End the engine because it must not go on, for instance since another one has its place."""
        self._die(error)

    def kill_workers(self) -> None:
        """Kill the worker processes at once; any thread may call it."""
        self._workers.kill()

    async def workers_gone(self) -> None:
        """Wait until killed workers have ended: then nobody uses the engine's memory any more."""
        await self._workers.wait_gone()

    def drain(self, within_s: float | None = None) -> None:
        """Refuse new requests from now on. Requests in flight go on for ``within_s`` s; None: for ever."""
        if self.life.state in (LifeState.ACTIVE, LifeState.DRAINED):
            self._enter(LifeState.DRAINING, within_s=within_s)

    async def end_requests(self) -> None:
        """End the requests in flight with their output so far, as a shutdown does, and wait for that."""
        if self._manager is not None and self.life.error is None and self._manager.num_requests:
            self._manager.abort(abort_all=True, message=SHUTDOWN_MESSAGE)
            try:
                await asyncio.wait_for(self._manager.wait_idle(), ABORT_S)
            except TimeoutError:
                logger.warning("%d requests did not end at shutdown", self._manager.num_requests)

    def set_drained(self, drained: bool) -> None:
        """Refuse new requests, or take them again. Requests in flight go on.

        Raises:
            DrainingError: the server is shutting down.
            EngineDeadError: the engine has ended.
        """
        if self.life.state not in (LifeState.ACTIVE, LifeState.DRAINED):
            assert self.life.trouble is not None
            raise self.life.trouble
        state = LifeState.DRAINED if drained else LifeState.ACTIVE
        if state is not self.life.state:
            self._enter(state)
            logger.info("an operator drains the engine" if drained else "the engine takes requests again")

    def _enter(
        self, state: LifeState, error: SegueError | None = None, *, within_s: float | None = None
    ) -> None:
        """Enter the next state of the engine's life, and log it: nothing else does."""
        before = self.life.state
        seconds = self.life.advance(state, error, within_s=within_s)
        logger.info("%s, after %.3f s of %s", state.name.lower(), seconds, before.name.lower())
        why = "" if error is None else f": {error.message}"
        text = f"{before.name.lower()} → {state.name.lower()}{why}"
        self.log.add("life", text, seconds, failed=error is not None)

    def _stands_by(self) -> bool:
        return self.life.state is LifeState.STANDBY

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something until the shutdown."""
        self._watching.append(self._loop.create_task(work))

    async def _note_loading(self) -> None:
        """Note as progress of the start that the workers have read or written memory, until it has ended."""
        known = 0
        while self.life.state is LifeState.INIT:
            now = touched_bytes(self.worker_pids)
            if abs(now - known) >= LOADED_BYTES:
                known = now
                self.life.note_progress()
            await asyncio.sleep(LOADING_POLL_S)

    async def _check_workers_forever(self) -> None:
        """Judge the heartbeats twice per period, as a task, until the shutdown cancels it."""
        config = self.config
        self._vitals = WorkerHealth(
            config.tp, ping_s=config.ping_s, stall_s=config.stall_s, now=time.monotonic()
        )
        while True:
            self._check_workers()
            await asyncio.sleep(self._vitals.period / 2)

    def _check_workers(self) -> None:
        """Mark the engine as hung, or as answering again, by the workers' heartbeats."""
        if self._vitals is None or self.life.error is not None:
            return
        reason = self._vitals.verdict(time.monotonic())
        if reason is not None and self.life.hung is None:
            logger.error("the engine hangs: %s", reason)
            self.log.add("life", f"the engine hangs: {reason}", failed=True)
            text = f"the engine hangs: {reason}; retry later, and restart the engine if this persists"
            self.life.hung = text
            self.manager.calls.fail(EngineHungError(text))
        elif reason is None and self.life.hung is not None:
            logger.warning("the engine answers again")
            self.log.add("life", "the engine answers again")
            self.life.hung = None

    def _receive(self, message: WorkerMessage) -> None:
        """Take what a worker says of itself; the tokenizer manager takes all other messages."""
        match message:
            case Ready() if not self._ready.done():
                if self._on_start is not None:
                    self._on_start(None)
                self._ready.set_result(message)
            case StartFailed():
                self._fail_start(error_of(message.kind, message.message))
            case Heartbeat() if self._vitals is not None:
                self._vitals.note(message, time.monotonic())
                self._note_owner(message)
            case StartStep():
                self.life.note_progress()
                if self._on_start is not None and message.rank == 0:
                    self._on_start(message)
            case RankAnswer():
                self._ranks.take(message)
            case Ready() | Heartbeat():  # a second one, or one from before the engine is watched
                pass

    def _note_owner(self, beat: Heartbeat) -> None:
        """Note whether a rank has lost the memory service, which may have to end the engine."""
        self._without_owner = (
            (self._without_owner | {beat.rank}) if beat.owner_lost else (self._without_owner - {beat.rank})
        )
        if beat.owner_lost and self.config.on_gms_loss == "exit" and self.life.error is None:
            text = f"the memory service in {self.config.gms_dir} has ended (--on-gms-loss exit)"
            self._die(MemoryServiceLostError(f"{text}; start both again"))

    def _on_error(self, error: Exception) -> None:
        """End the engine: a message was lost, so requests could wait forever."""
        logger.error("the frontend failed on a message of the scheduler", exc_info=error)
        self._die(
            EngineDeadError(
                f"the frontend failed: {type(error).__name__}: {error}; the engine has ended, start it again"
            )
        )

    def _on_exit(self, reason: str) -> None:
        """Take the exit of a worker. Called by the thread that watches the worker."""
        with suppress(RuntimeError):  # the event loop is closed, so the exit does not matter any more
            self._loop.call_soon_threadsafe(self._on_worker_exit, reason)

    def _on_worker_exit(self, reason: str) -> None:
        """Fail the start, or end the engine, because a worker has ended by itself with this ``reason``.

        A worker that fails sends ``StartFailed`` before it ends. The exit may be known first, so the message
        has ``LAST_MESSAGE_S`` to arrive, and what comes first decides the error.
        """
        if self._is_shut_down or self.life.error is not None:
            return
        if not self._ready.done():  # a message with the reason may be in transit
            error = EngineStartError(f"{reason} before it was ready; see its log above")
            self._loop.call_later(LAST_MESSAGE_S, self._fail_start, error)
        elif self._ready.exception() is None:  # else the start has failed already, with a reason
            self._die(EngineDeadError(f"{reason}; the engine has ended, start it again"))

    def _fail_start(self, error: SegueError) -> None:
        """Have :meth:`start` raise the error, unless the workers were ready or it has failed before."""
        if not self._ready.done():
            self._ready.set_exception(error)

    def _die(self, error: SegueError) -> None:
        """End a running engine that cannot go on, and tell who waits for :attr:`died`. Not for a shutdown."""
        if self.life.error is None:
            logger.error("%s", error.message)
            self._workers.kill()  # none of them can go on without the others
            self._end(error)
            self.died.set_result(error)

    def _end(self, error: SegueError) -> None:
        """Mark the engine as dead, and end every request and call with the error; the first error stays."""
        if self.life.error is None:
            self._enter(LifeState.DEAD, error)
            self._ranks.fail(error)
            if self._manager is not None:
                self._manager.die(error)
