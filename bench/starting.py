"""What measurements of an engine's start share: the workload's options, and how old this process is.

It imports no more than a program does that makes an engine, since that counts as a part of the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.options import parse

WORKLOAD = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_running_requests": 256,
    "disable_prefix_cache": True,
}


def engine_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse engine options of the form `--name=value`.

    Raises:
        ConfigError: an argument has another form, an unknown name or a wrong value.
    """
    hints = get_type_hints(EngineConfig)
    found = {}
    for argument in arguments:
        flag, _, text = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in hints or "=" not in argument:
            raise ConfigError(f"{argument!r}: give an option of the engine as --name=value")
        found[name] = parse(text, hints[name], name)
    EngineConfig(**found)
    return found


def age(pid: int | None = None) -> float:
    """Return the seconds since a process began: this one, or another one's."""
    ticks = Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
