"""The scheduler's part of ``internal_states``. The keys have SGLang's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from segue.messages.control import HandoverCounters
from segue.scheduler.pause import PauseState
from segue.scheduler.request import PREFILL

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


# The queues of handing over KV, by SGLang's names, with the states of the offers or leases that they have.
_OFFER_QUEUES = {
    "disagg_prefill_bootstrap_queue_size": ("open", "claimed"),
    "disagg_prefill_inflight_queue_size": ("sending", "draining"),
}
_LEASE_QUEUES = {
    "disagg_decode_prealloc_queue_size": ("claimed", "queued"),
    "disagg_decode_transfer_queue_size": ("granted", "preparing", "landed", "ahead"),
}


def _handover(s: Scheduler, counters: HandoverCounters) -> dict[str, Any]:
    """Returns the counters of handing over, and what happened to the handovers that ended last."""
    machine = s.handover.machine
    recent = machine.offers.recent.report() + machine.leases.recent.report()
    return structs.asdict(counters) | {"recent": recent}


def internal_state(s: Scheduler) -> dict[str, Any]:
    """Returns the present state of the queues and pools, and the counters, for the route that reports it.

    ``tree_cache_size``, ``available_kv_tokens`` and ``num_used_tokens`` (of requests, offers and leases)
    are in tokens, because SGLang counts tokens and not pages; ``req_to_token_pool_*`` count request slots.
    The pause is the one that a client sees.
    """
    resources, ratio, laps = s.resources, s.new_token_ratio, s.report_laps()
    handover = s.handover.counters()
    prefilling = [r.rid for r in s.running.values() if r.phase is PREFILL]
    return {
        "engine_paused": s.control.client_state is PauseState.PAUSED,
        "pause_mode": s.control.client_mode,
        "pause_state": s.control.client_state.name.lower(),
        "waiting_queue_size": len(s.waiting),
        "waiting_queue_rids": [r.rid for r in s.waiting],
        "retracted_queue_size": sum(r.has_begun for r in s.waiting),
        "num_waiting_uncached_tokens": sum(r.remaining for r in s.waiting),
        "running_batch_size": len(s.running),
        "running_batch_rids": list(s.running),
        "cur_batch_is_none": not s.in_flight,
        "last_batch_is_none": not s.in_flight,
        "chunked_req_is_none": not prefilling,
        "chunked_req_rids": prefilling,
        "tree_cache_size": resources.prefix.num_pages * s.limits.page_size,
        "req_to_token_pool_total": s.limits.max_running_requests,
        "req_to_token_pool_used": s.limits.max_running_requests - len(resources.free_slots),
        "req_to_token_pool_available": len(resources.free_slots),
        "available_kv_tokens": len(resources.free_pages) * s.limits.page_size,
        "num_used_tokens": (s.limits.num_pages - resources.num_available) * s.limits.page_size,
        "num_generated_tokens": s.totals.output_tokens,
        "forward_ct_decode": s.num_decode_steps,
        "num_steps": s.totals.num_steps,
        "num_preemptions": s.totals.num_preemptions,
        "num_flushes": s.num_flushes,
        "graph_hit": sum(s.totals.graph_hits.values()),
        "graph_hit_by_kind": s.totals.graph_hits,
        "eager": s.totals.eager_steps,
        "padded_tokens": s.totals.padded_tokens,
        "kernel_compilations_after_ready": sum(s.totals.compiled_kernels.values()),
        "kernel_loads_after_ready": sum(s.totals.loaded_kernels.values()),
        "laps": None if laps is None else structs.asdict(laps),
        "role": s.roles.role,
        "handover": _handover(s, handover) if s.config.role != "both" else None,
        **{name: sum(handover.offers.get(each, 0) for each in of) for name, of in _OFFER_QUEUES.items()},
        **{name: sum(handover.leases.get(each, 0) for each in of) for name, of in _LEASE_QUEUES.items()},
        "new_token_ratio": ratio.value,
        "init_new_token_ratio": ratio.initial,
        "weight_version": s.weight_version,
        "released_memory": sorted(s.standby.away),
    }
