"""Discovery by Kubernetes: one Lease of ``coordination.k8s.io/v1`` per engine, and one per cohort's epoch.

The library is kubernetes-asyncio, which is installed by ``segue[kubernetes]``. A Lease's ``leaseTransitions``
is the epoch, and an annotation has the record. Whoever watches counts a Lease as ended once it has seen no
renewal for the Lease's duration by its own clock, so that clocks need not agree.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from segue.discovery.base import RETRY_S, OnRecords, Polling
from segue.discovery.record import EngineRecord, pack_record, unpack_record
from segue.errors import ConfigError, DiscoveryError
from segue.extras import KUBERNETES
from segue.logs import logger
from segue.options import check_name

POLL_S = 2.0  # changes are also told by a watch of the API server, at once
CALL_S = 5.0  # for the API server to answer
RENEWALS = 3  # of a Lease in its duration
LONG_GONE = 10  # durations without a renewal, after which any engine of the cohort removes a Lease
TRIES = 8  # to write a Lease that others write at the same time
LABEL = "segue-cohort"  # of the Leases of engines
ANNOTATION = "segue/record"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
NOT_FOUND, CONFLICT = 404, 409
Answer = TypeVar("Answer")
LeaseObject = dict[str, Any]  # as the API server has it


@dataclass(slots=True)
class _Seen:
    """A Lease as it was seen last."""

    version: str
    at: float  # when this version was first seen, on the monotonic clock


class KubernetesDiscovery:
    """Records in Leases; see `segue.discovery.base.DiscoveryBackend`."""

    def __init__(self, namespace: str, ttl_s: float) -> None:
        """Use the API server of the pod's cluster, or outside of a cluster the one of ``KUBECONFIG``.

        Args:
            namespace: of the Leases; "": the pod's own, or "default".
            ttl_s: how long the record of an engine that has died stays.

        Raises:
            ConfigError: kubernetes-asyncio is not installed, or no API server is known.
        """
        try:
            import aiohttp
            from kubernetes_asyncio import client
        except ImportError as error:
            text = f"discovery='kubernetes' needs the library kubernetes-asyncio ({error})"
            raise ConfigError(f"{text}; {KUBERNETES.remedy}", param="discovery") from None
        file = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        self._is_inside = "KUBERNETES_SERVICE_HOST" in os.environ
        if not self._is_inside and not Path(file).exists():
            text = f"discovery='kubernetes': this is no pod, and there is no file {file}"
            raise ConfigError(f"{text}; give one by the variable KUBECONFIG", param="discovery")
        self._file = file
        self._namespace = namespace or _own_namespace()
        self._ttl_s = ttl_s
        self._refused = client.ApiException
        self._errors = (client.ApiException, aiohttp.ClientError, OSError, ValueError, KeyError)
        self._api: Any = None  # made on the event loop
        self._polling = Polling(POLL_S)
        self._seen: dict[str, _Seen] = {}  # by the name of a Lease
        self._put: dict[str, tuple[EngineRecord, str]] = {}  # with the version, by the name of the Lease
        self._keeping: asyncio.Task[None] | None = None
        self._others: dict[str, _Seen] = {}  # as `_seen`, of the engines beside this one

    async def put(self, record: EngineRecord) -> None:
        """Put an engine's record in place of its last one, and keep it alive from now on."""
        name = _engine_name(record.cohort, record.engine)
        _, version = self._put.get(name, (record, ""))
        self._put[name] = record, await self._call(lambda: self._write(name, record, version))
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep())

    async def remove(self, cohort: str, engine: str) -> None:
        """Remove an engine's record."""
        name = _engine_name(cohort, engine)
        self._put.pop(name, None)
        await self._call(lambda: self._delete(name))

    async def list(self) -> Sequence[EngineRecord]:
        """Returns the records whose Leases are renewed, sorted by cohort and engine."""
        leases = await self._call(self._leases)
        now = time.monotonic()
        before, self._seen, records = self._seen, {}, []
        for lease in leases:
            name, version = lease["metadata"]["name"], lease["metadata"]["resourceVersion"]
            seen = before.get(name)
            if seen is None or seen.version != version:
                seen = _Seen(version, now)
            self._seen[name] = seen
            record = unpack_record(lease["metadata"].get("annotations", {}).get(ANNOTATION, ""))
            duration_s = lease.get("spec", {}).get("leaseDurationSeconds", 0)
            if record is not None and now < seen.at + duration_s:
                records.append(record)
        return sorted(records, key=lambda record: (record.cohort, record.engine))

    async def watch(self, on_records: OnRecords) -> None:
        """Call ``on_records`` with all records, at once and whenever they change."""
        listening = asyncio.ensure_future(self._listen())
        try:
            await self._polling.watch(self, on_records)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        """Claim an epoch; returns whether it is this engine's."""
        return await self._call(lambda: self._claim(_epoch_name(cohort), epoch))

    async def highest_epoch(self, cohort: str) -> int:
        """Returns the highest epoch that was ever claimed here."""
        return await self._call(lambda: self._highest(_epoch_name(cohort)))

    def nudge(self) -> None:
        """Look for changes at once."""
        self._polling.nudge()

    async def close(self) -> None:
        """Remove the records of this process; if the API server cannot be reached, they end by themselves."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        with suppress(DiscoveryError):
            for name in [*self._put]:
                del self._put[name]
                await self._call(lambda name=name: self._delete(name))  # type: ignore[misc]
        if self._api is not None:
            await self._api.api_client.close()

    # --- keeping records alive ---

    async def _keep(self) -> None:
        """Renew the Leases until this is cancelled; one that is gone is made anew."""
        problem = ""
        while True:
            await asyncio.sleep(RETRY_S if problem else self._ttl_s / RENEWALS)
            try:
                for name in [*self._put]:
                    await self._renew(name)
                await self._call(self._sweep)
                problem = ""
            except DiscoveryError as error:
                if str(error) != problem:
                    logger.warning("%s; this engine's record may end there until it is back", error)
                problem = str(error)

    async def _renew(self, name: str) -> None:
        if name not in self._put:
            return
        record, version = self._put[name]
        renewed = await self._call(lambda: self._write(name, record, version))
        if name not in self._put:  # it was removed meanwhile
            await self._call(lambda: self._delete(name))
        elif self._put[name][0] is record:
            self._put[name] = record, renewed

    async def _sweep(self) -> None:
        """Delete the Leases of engines of the same cohorts that are long gone: nobody else does."""
        cohorts = {record.cohort for record, _ in self._put.values()}
        now, before, self._others = time.monotonic(), self._others, {}
        for lease in await self._leases():
            metadata, spec = lease["metadata"], lease.get("spec", {})
            name, version = metadata["name"], metadata["resourceVersion"]
            if metadata["labels"][LABEL] not in cohorts or name in self._put:
                continue
            seen = before.get(name)
            self._others[name] = seen = seen if seen and seen.version == version else _Seen(version, now)
            if now >= seen.at + LONG_GONE * spec.get("leaseDurationSeconds", self._ttl_s):
                logger.info("deletes the Lease %s, which its engine has not renewed for long", name)
                await self._delete(name, version)

    async def _listen(self) -> None:
        """Look for records at once whenever the API server tells of a change, until this is cancelled."""
        from kubernetes_asyncio.watch import Watch

        while True:
            with suppress(DiscoveryError):
                await self._call(lambda: self._listen_once(Watch))
            await asyncio.sleep(RETRY_S)

    async def _listen_once(self, kind: Any) -> None:
        api = await self._connected()
        async with kind("object") as watch:
            async for _ in watch.stream(api.list_namespaced_lease, self._namespace, label_selector=LABEL):
                self._polling.nudge()

    # --- Leases ---

    async def _leases(self) -> Sequence[LeaseObject]:
        api = await self._connected()
        found = await api.list_namespaced_lease(
            self._namespace, label_selector=LABEL, _request_timeout=CALL_S
        )
        return [api.api_client.sanitize_for_serialization(each) for each in found.items]

    async def _read(self, name: str) -> LeaseObject | None:
        """Returns a Lease; None: there is none."""
        api = await self._connected()
        try:
            found = await api.read_namespaced_lease(name, self._namespace, _request_timeout=CALL_S)
        except self._refused as error:
            if error.status == NOT_FOUND:
                return None
            raise
        lease: LeaseObject = api.api_client.sanitize_for_serialization(found)
        return lease

    async def _save(self, lease: LeaseObject) -> str | None:
        """Write a Lease in place of its version, or one without a version as a new one.

        Returns the new version; None: it has another version, or there is one already, or none any more.
        """
        api, name = await self._connected(), lease["metadata"]["name"]
        try:
            if lease["metadata"].get("resourceVersion"):
                saved = await api.replace_namespaced_lease(
                    name, self._namespace, lease, _request_timeout=CALL_S
                )
            else:
                saved = await api.create_namespaced_lease(self._namespace, lease, _request_timeout=CALL_S)
        except self._refused as error:
            if error.status in (NOT_FOUND, CONFLICT):
                return None
            raise
        return str(saved.metadata.resource_version)

    async def _delete(self, name: str, version: str = "") -> None:
        """Delete a Lease, if it still has a version; "": whatever version it has."""
        api = await self._connected()
        body = {"preconditions": {"resourceVersion": version}} if version else None
        try:
            await api.delete_namespaced_lease(name, self._namespace, body=body, _request_timeout=CALL_S)
        except self._refused as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise

    async def _write(self, name: str, record: EngineRecord, version: str) -> str:
        """Write a record with the time of now, in place of a version or of none; returns the new version."""
        for _ in range(TRIES):
            metadata = {
                "name": name,
                "labels": {LABEL: record.cohort},
                "annotations": {ANNOTATION: pack_record(record).decode()},
            }
            spec = {
                "holderIdentity": record.engine,
                "leaseDurationSeconds": math.ceil(self._ttl_s),
                "leaseTransitions": record.epoch,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            }
            if (saved := await self._save(_lease(metadata, spec, version))) is not None:
                return saved
            found = await self._read(name)
            version = "" if found is None else found["metadata"]["resourceVersion"]
        raise DiscoveryError(f"discovery by Kubernetes failed: others write the Lease {name} all the time")

    async def _highest(self, name: str) -> int:
        lease = await self._read(name)
        return 0 if lease is None else int(lease["spec"]["leaseTransitions"])

    async def _claim(self, name: str, epoch: int) -> bool:
        for _ in range(TRIES):
            found, version = await self._read(name), ""
            if found is not None:
                if int(found["spec"]["leaseTransitions"]) >= epoch:
                    return False
                version = found["metadata"]["resourceVersion"]
            if await self._save(_lease({"name": name}, {"leaseTransitions": epoch}, version)) is not None:
                return True
        return False

    # --- the API server ---

    async def _connected(self) -> Any:
        """Returns the client of the API server."""
        if self._api is None:
            from kubernetes_asyncio import client, config

            settings = client.Configuration()
            try:
                if self._is_inside:
                    config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
                else:
                    await config.load_kube_config(config_file=self._file, client_configuration=settings)
            except Exception as error:  # the library checks little of the file: any kind may come
                what = "the pod's service account" if self._is_inside else self._file
                raise DiscoveryError(f"discovery by Kubernetes failed: {what}: {error!r}") from None
            self._api = client.CoordinationV1Api(client.ApiClient(settings))
        return self._api

    async def _call(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make a call; raises DiscoveryError if it fails."""
        try:
            return await call()
        except self._errors as error:
            status = getattr(error, "status", None)
            what = (
                f"HTTP {status} {getattr(error, 'reason', '')}"
                if status
                else f"{error or type(error).__name__}"
            )
            hint = "; see the Role in deploy/kubernetes" if status in (401, 403) else ""
            where = f"in namespace {self._namespace}"
            raise DiscoveryError(f"discovery by Kubernetes {where} failed: {what}{hint}") from None


def _lease(metadata: LeaseObject, spec: LeaseObject, version: str) -> LeaseObject:
    """Returns a Lease; ``version``: that it replaces, "": it is new."""
    if version:
        metadata = metadata | {"resourceVersion": version}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _engine_name(cohort: str, engine: str) -> str:
    check_name(cohort, "cohort")
    check_name(engine, "engine_id")
    return f"segue.{cohort}.{engine}"


def _epoch_name(cohort: str) -> str:
    check_name(cohort, "cohort")
    return f"segue.{cohort}"


def _own_namespace() -> str:
    with suppress(OSError):
        return NAMESPACE_FILE.read_text().strip()
    return "default"
