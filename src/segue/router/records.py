"""What a router makes of the record in which a worker says who it is."""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec import structs

from segue.messages.fleet import Role, WorkerRecord

ANY_HOST = ("0.0.0.0", "[::]")  # a worker that listens at every address has named none


def wrong_role(record: WorkerRecord, role: Role | None) -> str | None:
    """Returns why a worker's role is not the one that the options say; None: it is, or they say none."""
    if role is None or record.role == role:
        return None
    return (
        f"its --role is {record.role}, and the router's --{role} names it; start it with --role {role}, or "
        "name it by --worker"
    )


def as_reached(record: WorkerRecord, worker_id: str, url: str) -> WorkerRecord:
    """Returns the record with the addresses by which the router reaches the worker: it cannot know them."""
    host, _, port = record.kv_address.rpartition(":")
    kv_address = record.kv_address
    if host in ANY_HOST:
        hostname = urlsplit(url).hostname or ""
        kv_address = f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"
    return structs.replace(record, worker_id=worker_id, url=url, kv_address=kv_address)
