"""Hooks of Schemathesis: what a call has changed is taken back, so that the next finds the engine as ever.

Environment: ``SEGUE_URL``, ``SEGUE_MODEL`` and ``SEGUE_CHECKPOINT``, the directory of the served weights.
"""

from __future__ import annotations

import os
from typing import Any

import requests
import schemathesis

URL, MODEL, CHECKPOINT = (os.environ[f"SEGUE_{name}"] for name in ("URL", "MODEL", "CHECKPOINT"))
UNDO: dict[str, tuple[str, dict[str, Any]]] = {
    "/pause_generation": ("/continue_generation", {}),
    "/pause": ("/resume", {}),
    "/drain": ("/drain", {"drain": False}),
    "/role": ("/role", {"role": "both"}),
    "/begin_weight_update": ("/abort_weights_update", {}),
    "/start_weight_update": ("/abort_weights_update", {}),
    "/prepare_weights_update": ("/abort_weights_update", {}),
    "/weights_checker": ("/update_weights_from_disk", {"model_path": CHECKPOINT}),  # it may have reset them
}
# Nobody answers at the address of a generated group, and a call would wait for it.
JOINS = "/init_weights_update_group"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Have half of the requests name the model that is served, and let no call wait for long."""
    if not isinstance(case.body, dict):
        return
    name = case.body.get("model")
    if isinstance(name, str) and len(name) % 2 == 0:
        case.body["model"] = MODEL
    if case.path == JOINS and isinstance(case.body.get("timeout_s", 1.0), float):
        case.body["timeout_s"] = 0.1


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Take back what the call has changed."""
    if case.path in UNDO and response.status_code == 200:
        path, body = UNDO[case.path]
        undone = requests.post(f"{URL}{path}", json=body, timeout=20)
        assert undone.status_code < 500, (case.path, undone.text)
