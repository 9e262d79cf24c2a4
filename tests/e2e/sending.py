"""A trainer as a process of its own: ``python -m tests.e2e.sending DEVICE``.

Each line of its input is an update that it sends, and it answers with a line that says what it has sent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from segue.trainer import WeightSender
from tests.support.nccl import nccl_version


def main(device: str) -> None:
    """Send what the lines ask for: arguments of a `WeightSender`, and `model`, the checkpoint to send."""
    for line in sys.stdin:
        order = json.loads(line)
        weights = load_file(Path(order.pop("model")) / "model.safetensors", device)
        with WeightSender(weights=weights, **order) as sender:
            report = sender.send()
            assert sender._group is not None
            group = sender._group.group
        found = {
            "backend": group.backend,
            "nccl": nccl_version(),
            "world_size": group.world_size,
            "flattened": order["flattened"],
            "num_buckets": report.num_buckets,
            "bytes": report.bytes,
            "seconds": report.seconds,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
