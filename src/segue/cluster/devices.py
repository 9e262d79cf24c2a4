"""Which GPUs and how many cores each worker gets. Torch is not imported: the driver's tool lists the GPUs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from segue.config import Device
from segue.errors import DeviceCountError

NVIDIA_SMI = ("nvidia-smi", "-L")
LISTING_S = 60.0  # without the persistence daemon the driver initialises every GPU first


def list_gpus(environ: Mapping[str, str], command: Sequence[str] = NVIDIA_SMI) -> list[str]:
    """Return the GPUs that processes may use, as ``CUDA_VISIBLE_DEVICES`` names them; none without a driver.

    ``CUDA_VISIBLE_DEVICES`` in ``environ`` is obeyed. ``command`` prints a line per GPU; unlike the files
    under /proc/driver, nvidia-smi does not list GPUs of the host that this container may not use.
    """
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.findall(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-f-]+)\)", listing.stdout, re.MULTILINE)
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return found
    named = [name.strip() for name in visible.split(",")]
    return [name for name in named if name and name != "-1"] if found else []


def share_gpus(gpus: Sequence[str], device: Device, tp: int, num_workers: int) -> list[list[str]]:
    """Return each worker's own GPUs, ``tp`` of them; empty lists if the workers run on the CPU.

    Raises:
        DeviceCountError: there are fewer GPUs than all workers need.
    """
    if device == "cpu" or (device == "auto" and not gpus):
        return [[] for _ in range(num_workers)]
    needed = tp * num_workers
    if len(gpus) < needed:
        raise DeviceCountError(
            f"{num_workers} workers with --tp {tp} need {needed} GPUs, and {len(gpus)} can be used; start "
            "fewer workers, or use --device cpu",
            param="device",
        )
    return [list(gpus[tp * index : tp * (index + 1)]) for index in range(num_workers)]


def visible_gpus(shares: Sequence[Sequence[str]], index: int, *, sees_peers: bool) -> list[str]:
    """Return the GPUs that worker ``index`` can see, its own first: it runs on the first ones.

    With ``sees_peers`` those of all other workers follow. Both ends of a copy between two GPUs must see both.
    """
    own = list(shares[index])
    others = [gpu for share in shares for gpu in share if gpu not in own]
    return [*own, *others] if sees_peers else own


def threads_per_rank(num_cores: int, tp: int, num_workers: int) -> int:
    """Return how many OpenMP threads each rank gets if all ranks of all workers share the cores."""
    return max(1, num_cores // (tp * num_workers))
