"""Hooks of Schemathesis: every other body is made one that an engine can serve, and changes are taken back.

Environment: ``SEGUE_URL``, ``SEGUE_MODEL``, ``SEGUE_CHECKPOINT``, the directory of the served weights, and
``SEGUE_SERVED``, a file to which the path of each call that was answered with 200 is written.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import requests
import schemathesis

URL, MODEL, CHECKPOINT, SERVED = (
    os.environ[f"SEGUE_{name}"] for name in ("URL", "MODEL", "CHECKPOINT", "SERVED")
)
UNDO: dict[str, tuple[str, dict[str, Any]]] = {
    "/pause_generation": ("/continue_generation", {}),
    "/pause": ("/resume", {}),
    "/drain": ("/drain", {"drain": False}),
    "/role": ("/role", {"role": "both"}),
    "/begin_weight_update": ("/abort_weights_update", {}),
    "/start_weight_update": ("/abort_weights_update", {}),
    "/prepare_weights_update": ("/abort_weights_update", {}),
}
# These may change the weights, and the first may have overwritten them all.
UNDO |= dict.fromkeys(
    ("/weights_checker", "/update_weights", "/update_weights_from_disk", "/update_weights_from_tensor"),
    ("/update_weights_from_disk", {"model_path": CHECKPOINT}),
)
EITHER = {"/generate": ("input_ids", "text"), "/tokenize": ("messages", "prompt")}  # one, and not both
JOINS = "/init_weights_update_group"
TEXT = "The capital of France"
positive_bodies = count()


def complete(path: str, body: dict[str, Any]) -> None:
    """Give a body what the description cannot ask for: the model's name, texts, one prompt, a stream."""
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if path in EITHER:
        first, second = EITHER[path]
        body[second] = None if body.get(first) is not None else body.get(second) or TEXT
    if body.get("stream_options") is not None:
        body["stream"] = True
    for name in ("prompt", "text"):
        if body.get(name) == "":
            body[name] = TEXT
    for message in body.get("messages") or ():
        if message.get("content") is None:
            message["content"] = TEXT


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Complete every other body that fits the description, and let no call wait for long."""
    if not isinstance(case.body, dict):
        return
    is_positive = case.meta is not None and case.meta.generation.mode.is_positive
    if is_positive and next(positive_bodies) % 2 == 0:
        complete(case.path, case.body)
    # Nobody answers at the address of a generated group, and a call would wait for it.
    if case.path == JOINS and isinstance(case.body.get("timeout_s", 1.0), float):
        case.body["timeout_s"] = 0.1


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Take back what the call has changed."""
    if response.status_code != 200:
        return
    with open(SERVED, "a") as file:
        file.write(f"{case.path}\n")
    if case.path in UNDO:
        path, body = UNDO[case.path]
        undone = requests.post(f"{URL}{path}", json=body, timeout=20)
        assert undone.status_code < 500, (case.path, undone.text)
