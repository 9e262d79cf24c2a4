"""A fake engine with the weight routes, in a process that uses torch and the standard library alone.

``python -m tests.trainer.fake_engine`` prints its URL. ``POST /fault {path: message}`` makes a route fail.
With the message "hang", the route blocks until the fault is withdrawn, and then fails. A fault "receive" ends
the receiver before its first broadcast; with a fault "generating", the engine reports that it generates.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=30)


def describe(tensor: torch.Tensor) -> list[Any]:
    """Returns dtype, shape and a hash of the content, as JSON values."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]


class Engine:
    """An engine of one rank; ``weights`` are the served ones, ``staged`` the received ones."""

    def __init__(self) -> None:
        self.group: Any = None
        self.weights: dict[str, torch.Tensor] = {}
        self.staged: dict[str, torch.Tensor] = {}
        self.state = "idle"
        self.session_id: str | None = None
        self.num_buckets = 0
        self.error = ""
        self.version = 0
        self.faults: dict[str, str] = {}
        self.log: list[str] = []
        self.receiver = threading.Thread()
        self.joined: dict[str, Any] = {}

    @property
    def generates(self) -> bool:
        return "generating" in self.faults

    def server_info(self, body: Any) -> dict[str, Any]:
        return {"tp": 1}

    def weights_update_status(self, body: Any) -> dict[str, Any]:
        return {"state": self.state, "session_id": self.session_id, "generating": self.generates}

    def fault(self, body: Any) -> dict[str, Any]:
        self.faults, self.log = body, []
        return {}

    def seen(self, body: Any) -> dict[str, Any]:
        weights = {name: describe(tensor) for name, tensor in self.weights.items()}
        return {"log": self.log, "weights": weights, "version": self.version, "joined": self.joined}

    def init_weights_update_group(self, body: Any) -> dict[str, Any]:
        self.joined = body
        name, size = body["group_name"], body["world_size"]
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        try:
            store, rank, _ = next(rendezvous(where, body["rank_offset"], size, timeout=TIMEOUT))
            self.group, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],
                dist.Backend(body["backend"]),
                dist.PrefixStore(name, store),
                group_name=name,
                timeout=TIMEOUT,
            )
        except RuntimeError as error:
            return {"success": False, "message": str(error)}
        c10d._world.pg_group_ranks[self.group] = {r: r for r in range(size)}
        return {"success": True, "message": ""}

    def destroy_weights_update_group(self, body: Any) -> dict[str, Any]:
        if self.group is None:
            return {"success": False, "message": "no such group"}
        dist.destroy_process_group(self.group)
        self.group = None
        return {"success": True, "message": ""}

    def prepare_weights_update(self, body: Any) -> dict[str, Any]:
        if self.group is None:
            return {"status": "error", "message": "no such group"}
        self.state, self.session_id, self.num_buckets = "receiving", body["session_id"], 0
        self.staged, self.error = {}, ""
        self.receiver = threading.Thread(target=self._receive, args=(body, self.group), daemon=True)
        self.receiver.start()
        return {"status": "ready", "message": "", "generating": self.generates}

    def _receive(self, body: Any, group: Any) -> None:
        if "receive" in self.faults:
            if self.faults["receive"] != "hang":
                self._abort(self.faults["receive"])
            return
        try:
            for bucket in body["buckets"]:
                empty = [
                    torch.empty(shape, dtype=getattr(torch, dtype))
                    for dtype, shape in zip(bucket["dtypes"], bucket["shapes"], strict=True)
                ]
                if body["load_format"] == "flattened_bucket":
                    flat = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8)
                    dist.broadcast(flat, src=0, group=group)
                    parts = flat.split([tensor.nbytes for tensor in empty])
                    for tensor, part in zip(empty, parts, strict=True):
                        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
                else:
                    for tensor in empty:
                        dist.broadcast(tensor, src=0, group=group)
                self.staged |= dict(zip(bucket["names"], empty, strict=True))
                self.num_buckets += 1
        except RuntimeError as error:
            self._abort(str(error))

    def _abort(self, error: str) -> None:
        self.state, self.session_id, self.error = "idle", None, error

    def complete_weights_update(self, body: Any) -> dict[str, Any]:
        self.receiver.join(60)
        if self.session_id != body["session_id"]:
            return {"success": False, "message": self.error or "no such session"}
        self.state = "received"
        answer = {"success": True, "num_buckets_received": self.num_buckets, "message": ""}
        return answer | (self.commit_weights_update(body) if body["commit"] else {})

    def commit_weights_update(self, body: Any) -> dict[str, Any]:
        if self.state != "received":
            return {"success": False, "message": f"the session is {self.state}"}
        self.weights = self.staged
        self.version += 1
        self.state, self.session_id = "idle", None
        return {"success": True, "message": "", "weight_version": str(self.version)}

    def abort_weights_update(self, body: Any) -> dict[str, Any]:
        self._abort("it was aborted by a client")
        return {"success": True, "message": ""}


class Handler(BaseHTTPRequestHandler):
    engine = Engine()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        name = self.path.lstrip("/")
        if name not in ("seen", "fault"):
            self.engine.log.append(name)
        fault = self.engine.faults.get(name)
        deadline = time.monotonic() + 30
        while self.engine.faults.get(name) == "hang" and time.monotonic() < deadline:
            time.sleep(0.01)
        reply = {"success": False, "message": fault} if fault else getattr(self.engine, name)(body)
        data = json.dumps(reply).encode()
        self.send_response(200 if reply.get("success", True) else 400)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
