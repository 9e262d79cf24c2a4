"""What the weight routes let clients reach: directories of this machine, and the hub."""

from __future__ import annotations

import os
from typing import Any

from segue.config import EngineConfig
from segue.errors import InvalidRequestError
from segue.http_guard import is_loopback
from segue.messages.weight_operations import UpdateFromDisk, WeightOperation
from segue.options import parse_list


def limits(config: EngineConfig, operation: WeightOperation) -> dict[str, Any]:
    """The limits of ``TokenizerManager.ask_weights`` that the server's options set; the ranks keep them.

    Raises:
        InvalidRequestError: whoever reaches the server could have it read any file.
    """
    if not isinstance(operation, UpdateFromDisk):
        return {}
    roots = None
    if config.weights_root is not None:
        roots = parse_list(config.weights_root, os.pathsep, "weights_root")
    elif not (config.admin_api_key or is_loopback(config.host)):
        raise InvalidRequestError(
            f"this server listens on {config.host} without an admin key, so clients may not choose what it "
            "reads: start it with --weights-root and the directories of the checkpoints, or --admin-api-key",
            param="model_path",
        )
    return {"roots": roots, "from_hub": config.weights_from_hub}
