"""What the weight routes let clients reach: directories of this machine, and the hub."""

from __future__ import annotations

import os

from msgspec import structs

from segue.config import EngineConfig, parse_list
from segue.errors import InvalidRequestError
from segue.http_guard import is_loopback
from segue.messages.weight_update import UpdateFromDisk, WeightRequest


def admitted(config: EngineConfig, request: WeightRequest) -> WeightRequest:
    """``request`` with the limits that the server's options set; the ranks keep them where they read.

    Raises:
        InvalidRequestError: whoever reaches the server could have it read any file.
    """
    if not isinstance(request, UpdateFromDisk):
        return request
    roots = None
    if config.weights_root is not None:
        roots = parse_list(config.weights_root, os.pathsep, "weights_root")
    elif not (config.admin_api_key or is_loopback(config.host)):
        raise InvalidRequestError(
            f"this server listens on {config.host} without an admin key, so clients may not choose what it "
            "reads: start it with --weights-root and the directories of the checkpoints, or --admin-api-key",
            param="model_path",
        )
    return structs.replace(request, roots=roots, from_hub=config.weights_from_hub)
