"""The ``Hello`` of workers that fit together, for tests of their connection."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from segue.messages.kv import Hello, KVIdentity, RankAddress, TransportOffer

# Each field that must match, another value of it, and the option that the error has to name.
DIFFERENCES: list[tuple[str, Any, str]] = [
    ("protocol", 2, "same version of Segue"),
    ("model", "b00b", "--model"),
    ("tokenizer", "", "tokenizer.json"),
    ("layers", 28, "--model"),
    ("kv_heads", 4, "--model"),
    ("head_dim", 64, "--model"),
    ("dtype", "float16", "--dtype"),
    ("kv_cache", "fp8", "--kv-cache-dtype"),
    ("page_size", 16, "--page-size"),
    ("deterministic", True, "--deterministic"),
    ("work", ["prefill"], "--role"),
    ("incarnation", "incarnation of prefill", "another worker"),
]


def hello(role: Literal["prefill", "decode"], **changes: Any) -> Hello:
    """One of a worker of this role, which fits to one of the other role unless it is changed."""
    fitting = Hello(
        engine_id=f"{role}-1",
        incarnation=f"incarnation of {role}",
        boot_id="host-1",
        work=[role],
        model="5f0c",
        tokenizer="77aa",
        dtype="bfloat16",
        kv_cache="bfloat16",
        layers=36,
        kv_heads=8,
        head_dim=128,
        page_size=64,
        tp=1,
        num_pages=1000,
        max_seq_len=4096,
        deterministic=False,
        numerics="H200",
        identity=KVIdentity("v1", 1),
        ranks=[RankAddress(f"/run/{role}", "", [TransportOffer("shm", b"")])],
    )
    return replace(fitting, **changes)
