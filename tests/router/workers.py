"""Workers as a router sees them, with the fields that a test does not care about filled in."""

from __future__ import annotations

from random import Random
from typing import Any

from segue.laps.cost import Coefficients
from segue.messages.fleet import Role, WorkerLoad, WorkerRecord, WorkerReport, WorkerState
from segue.messages.kv import KVIdentity
from segue.router.choice import Ask, Decision, RoutingRules
from segue.router.decide import decide
from segue.router.fleet import FleetSnapshot, WorkerView

# Qwen3-8B on an H200, roughly.
DEVICE = Coefficients(floor=0.006, start=0.002, per_token=2.2e-5, per_pair=2e-10, per_kv=4e-8)
KV_BYTES = 147_456  # per token
PAGE = 64


def record(worker_id: str, role: Role = "both", **fields: Any) -> WorkerRecord:
    defaults: dict[str, Any] = {
        "url": f"http://{worker_id}",
        "incarnation": f"first of {worker_id}",
        "boot_id": "host",
        "model": "model",
        "tokenizer": "tokenizer",
        "page_size": PAGE,
        "max_seq_len": 32_768,
        "kv_bytes_per_token": KV_BYTES,
        "kv_address": f"{worker_id}:8998" if role == "prefill" else "",
    }
    return WorkerRecord(worker_id=worker_id, role=role, **defaults | fields)


def report(
    *,
    epoch: int = 0,
    state: WorkerState = "active",
    queued_s: float = 0.0,
    step_s: float = 0.01,
    decode_rows: int = 0,
    decode_kv: int = 0,
    taken_pages: int = 0,
    num_pages: int = 4000,
    coefficients: Coefficients = DEVICE,
    version: str = "1",
    commits: int = 0,
    **fields: Any,
) -> WorkerReport:
    return WorkerReport(
        epoch=epoch,
        state=state,
        load=WorkerLoad(
            queued_s=queued_s,
            step_s=step_s,
            decode_rows=decode_rows,
            decode_kv=decode_kv,
            num_pages=num_pages,
            taken_pages=taken_pages,
        ),
        coefficients=(*coefficients,),
        identity=KVIdentity(version, commits),
        **{"heartbeat_age_s": 0.2} | fields,
    )


def view(
    worker_id: str, role: Role = "both", *, at: float = 0.0, record_fields: Any = None, **fields: Any
) -> WorkerView:
    """A worker that reported at the time ``at``; ``fields`` are those of `report`."""
    known = record(worker_id, role, **(record_fields or {}))
    return WorkerView(record=known, newest_epoch=known.epoch).reported(report(**fields), at)


def ask(num_tokens: int = 1000, max_new_tokens: int = 100, **fields: Any) -> Ask:
    return Ask(**{"number": 0} | fields, num_tokens=num_tokens, max_new_tokens=max_new_tokens)


def chosen(
    request: Ask, *workers: WorkerView, held: Any = None, seed: int = 0, now: float = 0.0, **rules: Any
) -> Decision:
    snapshot = FleetSnapshot(workers=workers, held=held or {})
    return decide(request, snapshot, now, RoutingRules(**rules), Random(seed))
