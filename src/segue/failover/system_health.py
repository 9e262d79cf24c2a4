"""Whether a process is healthy, judged by its endpoints or by what was set for the whole of it."""

from __future__ import annotations

from collections.abc import Sequence

from segue.config import HealthStatus


class SystemHealth:
    """The status of each endpoint, and that of the system. It lives on one event loop.

    An endpoint is *ready* once it serves and is registered. One with a *health check* is asked now and then
    whether it really answers, and whoever asks sets its status by the answer.
    """

    def __init__(self, starting: HealthStatus = "notready", listed: Sequence[str] = ()) -> None:
        """Begin with the status ``starting``; health depends on the ``listed`` endpoints if there are any."""
        self._system = starting
        self._listed = tuple(listed)
        self._endpoints: dict[str, HealthStatus] = {}
        self._checked: set[str] = set()

    def set_health_status(self, status: HealthStatus) -> None:
        """Set the status of the system, which counts while no endpoint does."""
        self._system = status

    def set_endpoint(self, name: str, status: HealthStatus) -> None:
        """Set the status of an endpoint."""
        self._endpoints[name] = status

    def add_health_check(self, name: str) -> None:
        """Note that an endpoint has a health check."""
        self._checked.add(name)

    def get_health_status(self) -> tuple[bool, dict[str, HealthStatus]]:
        """Returns whether the process is healthy, and the status of each endpoint.

        If endpoints are listed, all of them must be ready. Otherwise all endpoints with a health check must
        be. If there are none of either, the status of the system decides.
        """
        deciding = self._listed or tuple(self._checked)
        if deciding:
            is_healthy = all(self._endpoints.get(name) == "ready" for name in deciding)
        else:
            is_healthy = self._system == "ready"
        return is_healthy, dict(self._endpoints)
