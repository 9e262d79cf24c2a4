"""The part of a Kubernetes API server that keeps Leases: versions, conflicts, labels and watches."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from aiohttp import web

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
TOKEN = "secret"


class FakeKubernetes:
    """An API server on the test's own event loop."""

    def __init__(self, kubeconfig: Path) -> None:
        """``kubeconfig``: the file that a client finds the server by, once it is started."""
        self.leases: dict[str, dict[str, Any]] = {}
        self.token = TOKEN
        self.num_watches = 0
        self._kubeconfig = kubeconfig
        self._version = 0
        self._changed = asyncio.Event()
        self._events: list[dict[str, Any]] = []
        app = web.Application()
        app.router.add_get(LEASES, self._list)
        app.router.add_post(LEASES, self._create)
        app.router.add_get(f"{LEASES}/{{name}}", self._read)
        app.router.add_put(f"{LEASES}/{{name}}", self._replace)
        app.router.add_delete(f"{LEASES}/{{name}}", self._delete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": f"http://{host}:{port}"}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
        }
        self._kubeconfig.write_text(json.dumps(config))  # which is YAML too

    async def stop(self) -> None:
        await self._runner.cleanup()

    # --- routes ---

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._check_token(request)
        label = request.query.get("labelSelector", "")
        if request.query.get("watch"):
            return await self._watch(request, label)
        items = [each for each in self.leases.values() if _has_label(each, label)]
        metadata = {"resourceVersion": str(self._version)}
        content = {"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "metadata": metadata}
        return web.json_response(content | {"items": items})

    async def _watch(self, request: web.Request, label: str) -> web.StreamResponse:
        self.num_watches += 1
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        told = len(self._events)
        while True:
            for event in self._events[told:]:
                if _has_label(event["object"], label):
                    await response.write(json.dumps(event).encode() + b"\n")
            told = len(self._events)
            changed = self._changed
            await changed.wait()

    async def _create(self, request: web.Request) -> web.Response:
        lease = await self._taken(request)
        name = lease["metadata"]["name"]
        if lease["metadata"].get("resourceVersion"):
            return _status(400, "BadRequest")
        if name in self.leases:
            return _status(409, "AlreadyExists")
        return self._save(lease, "ADDED", 201)

    async def _read(self, request: web.Request) -> web.Response:
        self._check_token(request)
        lease = self.leases.get(request.match_info["name"])
        return _status(404, "NotFound") if lease is None else web.json_response(lease)

    async def _replace(self, request: web.Request) -> web.Response:
        lease = await self._taken(request)
        before = self.leases.get(request.match_info["name"])
        if before is None:
            return _status(404, "NotFound")
        # Leases cannot be replaced without a version.
        if lease["metadata"].get("resourceVersion") != before["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        return self._save(lease, "MODIFIED", 200)

    async def _delete(self, request: web.Request) -> web.Response:
        self._check_token(request)
        lease = self.leases.get(request.match_info["name"])
        if lease is None:
            return _status(404, "NotFound")
        options = await request.json() if request.can_read_body else None
        wanted = ((options or {}).get("preconditions") or {}).get("resourceVersion")
        if wanted not in (None, lease["metadata"]["resourceVersion"]):
            return _status(409, "Conflict")
        del self.leases[request.match_info["name"]]
        self._tell("DELETED", lease)
        return _status(200, "")

    # --- what they have in common ---

    def _check_token(self, request: web.Request) -> None:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise web.HTTPForbidden(text="{}", content_type="application/json")

    async def _taken(self, request: web.Request) -> dict[str, Any]:
        """A Lease that a client has sent, which is checked as the API server does it."""
        self._check_token(request)
        lease: dict[str, Any] = await request.json()
        spec = lease["spec"]
        assert (lease["apiVersion"], lease["kind"]) == ("coordination.k8s.io/v1", "Lease")
        assert NAME.fullmatch(lease["metadata"]["name"])
        assert MICRO_TIME.fullmatch(spec.get("renewTime", "2026-01-01T00:00:00.000000Z"))
        assert spec.get("leaseDurationSeconds", 1) > 0 and spec.get("leaseTransitions", 0) >= 0
        return lease

    def _save(self, lease: dict[str, Any], kind: str, status: int) -> web.Response:
        self._version += 1
        namespace = {"namespace": "default", "resourceVersion": str(self._version)}
        lease["metadata"] |= namespace
        self.leases[lease["metadata"]["name"]] = lease
        self._tell(kind, lease)
        return web.json_response(lease, status=status)

    def _tell(self, kind: str, lease: dict[str, Any]) -> None:
        self._events.append({"type": kind, "object": lease})
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _has_label(lease: dict[str, Any], label: str) -> bool:
    return not label or label in lease["metadata"].get("labels", {})


def _status(code: int, reason: str) -> web.Response:
    content = {"apiVersion": "v1", "kind": "Status", "code": code, "reason": reason}
    return web.json_response(content, status=code)
