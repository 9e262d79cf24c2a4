"""Every route of the application, for tests that must not miss one."""

from __future__ import annotations

from segue.config import EngineConfig
from segue.server.access import GuardedRoute
from segue.server.app import create_app

# Applications share their routes, so these are a running server's own.
ROUTES = [route for route in create_app(EngineConfig()).routes if isinstance(route, GuardedRoute)]
