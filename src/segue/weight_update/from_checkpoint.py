"""Loading a whole checkpoint from disk as a session's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import cast

from segue.checkpoint import hub, model_files
from segue.checkpoint.load import read_weights
from segue.checkpoint.safetensors import BOUNCE_BYTES
from segue.checkpoint.source import resolve_weights
from segue.config import LoadFormat
from segue.errors import InvalidRequestError
from segue.memory.arena import Arena
from segue.messages.weight_operations import UpdateFromDisk
from segue.messages.weight_update import Load
from segue.models.config import ModelConfig
from segue.weight_update.manifest import first
from segue.weight_update.staging import StagedWeights

_BUFFER_BYTES = 64 << 10  # on a CPU: too small a buffer for torch to copy from it with several threads


def load(staged: StagedWeights, command: Load, is_cancelled: Callable[[], bool]) -> list[str]:
    """Read the checkpoint that `command` names into `staged`; returns the problems of its values, by name.

    Raises:
        SegueError: the checkpoint cannot be found or read, is of another model, or needs too much memory; or
            the session was cancelled.
    """
    own = [staged.served.cache_dir, *([hub.cache_directory()] if command.from_hub else [])]
    # Segue's own caches may be read even if `command.roots` restricts a client's paths.
    rules = model_files.Reading(roots=command.roots, own=own, hub=command.from_hub, is_cancelled=is_cancelled)
    with model_files.reading(rules):
        return _load(staged, command.request)


def _load(staged: StagedWeights, request: UpdateFromDisk) -> list[str]:
    """Do the work of `load`, under the rules for reading files that hold for this thread.

    Nothing is staged before the checkpoint's config was compared with the served model's.
    """
    served, table = staged.served, staged.served.weight_map
    load_format = cast(LoadFormat, request.load_format or "auto")  # rank 0 has checked it
    wanted = hub.parse_id(request.model_path)
    revision = None if wanted is None else served.revisions.get(wanted.repository)
    source = resolve_weights(
        request.model_path, load_format, served.cache_dir, served.config, revision=revision
    )
    differences = _differences(served.config, source.config)
    if differences:
        raise InvalidRequestError(
            f"the model at {model_files.short_path(request.model_path)} is not the one served: "
            f"{'; '.join(differences)}. Start an engine with it instead"
        )
    # A buffer must hold at least one row of any tensor, at 8 bytes per value (float64) at most.
    widest = max(shape[-1] for shape in table.shapes.values())
    size = max(_BUFFER_BYTES, 8 * widest) if served.device.type == "cpu" else BOUNCE_BYTES

    def make() -> Arena:  # called once the files were checked
        staged.forget()  # weights staged before in this session: the checkpoint replaces all of them
        staged.add(table.names)
        assert staged.whole is not None
        return staged.whole

    with staged.memory.on_stream():
        # Each item says that one more block was copied to the arena.
        for _ in read_weights(source, table, make, served.dtype, seed=served.seed, buffer_bytes=size):
            model_files.raise_if_cancelled()
    staged.memory.synchronize()
    return first(staged.problems(table.names))


def _differences(served: ModelConfig, other: ModelConfig) -> list[str]:
    """Returns the config fields that differ; the format of the weights does not count: it is converted."""
    return [
        f"{field.name} is {getattr(other, field.name)!r}, not {getattr(served, field.name)!r}"
        for field in fields(ModelConfig)
        if field.name not in ("dtype", "fp8") and getattr(served, field.name) != getattr(other, field.name)
    ]
