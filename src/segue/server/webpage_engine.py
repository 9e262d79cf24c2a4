"""What the web page shows of an engine. Nothing here asks the scheduler: the frontend knows it all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import State

from segue.failover.life import LifeState
from segue.frontend.control_log import ControlLog
from segue.launch.runtime import Runtime
from segue.server.webpage_feed import Mean
from segue.version import __version__

NOTHING = ControlLog()  # that an engine has logged which is not there yet


@dataclass(slots=True)
class EngineFeedSource:
    """An engine, which the application's ``state`` has once it serves."""

    state: State
    _tokens: tuple[int, int] = (0, 0)  # output and prompt tokens at the last sample
    _first: Mean = field(default_factory=Mean)
    _between: Mean = field(default_factory=Mean)

    @property
    def _runtime(self) -> Runtime | None:
        found: Runtime | None = self.state.runtime
        return found

    @property
    def log(self) -> ControlLog:
        """The engine's log."""
        return NOTHING if self._runtime is None else self._runtime.log

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended, or shuts down and has no request."""
        if (runtime := self._runtime) is None:
            return False
        state = runtime.life.state
        shuts_down = state is LifeState.DRAINING and not runtime.manager.num_requests
        return shuts_down or state is LifeState.DEAD

    def status(self) -> dict[str, Any]:
        """Who the engine is, in which state, with which weights, and what its start has taken."""
        if (runtime := self._runtime) is None:
            return {"kind": "engine", "version": __version__, "state": "init"}
        manager, ready = runtime.manager, runtime.manager.ready
        counters, weights, trouble = manager.stats.counters, manager.weights, runtime.trouble
        return {
            "kind": "engine",
            "version": __version__,
            "incarnation": runtime.incarnation,
            "started_at": runtime.started_at,
            "model": runtime.name,
            "state": runtime.life.state.name.lower(),
            "hung": runtime.life.hung is not None,
            "trouble": None if trouble is None else trouble.message,
            "paused": counters.paused,
            "update": weights.state,
            "weight_version": weights.version,
            "num_updates": weights.num_committed,
            "num_failed_updates": weights.num_failed,
            "last_update": weights.last,
            "released": counters.released,
            "role": manager.role,
            "epoch": runtime.epoch,
            "tp": runtime.config.tp,
            "device": ready.device,
            "dtype": ready.dtype,
            "attention_backend": ready.attention_backend,
            "weight_bytes": ready.weight_bytes,
            "kv_bytes": ready.kv_bytes,
            "num_pages": ready.limits.num_pages,
            "page_size": ready.limits.page_size,
            "max_seq_len": ready.limits.max_seq_len,
            "max_running_requests": ready.limits.max_running_requests,
            "start": [{"name": step.name, "seconds": step.seconds} for step in ready.init_steps],
            "graphs": msgspec.to_builtins(ready.graphs),
        }

    def sample(self, seconds: float) -> dict[str, Any]:
        """Requests, tokens per second, share of the KV cache, and mean times to and between tokens."""
        if (runtime := self._runtime) is None:
            return {}
        stats, pages = runtime.manager.stats, runtime.manager.ready.limits.num_pages
        now = stats.counters
        before, self._tokens = self._tokens, (now.output_tokens, stats.prompt_tokens)
        output, prompt = (
            round((after - old) / seconds, 2) if seconds else 0.0
            for old, after in zip(before, self._tokens, strict=True)
        )
        return {
            "running": now.num_running,
            "waiting": now.num_waiting,
            "output_per_s": output,
            "prompt_per_s": prompt,
            "kv_used": round(now.used_pages / pages, 4),
            "kv_taken": round(now.taken_pages / pages, 4),
            "first_token_s": self._first.take(stats.first_token),
            "between_tokens_s": self._between.take(stats.between_tokens),
            "paused": now.paused is not None,
        }

    def detail(self) -> dict[str, Any]:
        """Nothing more."""
        return {}
