"""Engines of one rank and of two in one group over NCCL with their trainer: four ranks.

They are on four GPUs, or on two: one engine beside rank 0 of the other, and the trainer beside its rank 1.
The two processes of a GPU take turns, or with CUDA's MPS run side by side: the speed there means nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.one_group import Ranks, check_updates
from tests.e2e.syncing import write_checkpoints
from tests.gpu.ranks import ENVIRONMENT
from tests.support.nccl import nccl_version

NUM_GPUS = torch.cuda.device_count()
NCCL = nccl_version()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(
        NUM_GPUS < 4 and (NCCL or (0, 0, 0)) < (2, 30, 0),
        reason=f"needs four CUDA devices, or NCCL 2.30, with which ranks can share a device; NCCL is {NCCL}",
    ),
    pytest.mark.timeout(110),
]
OPTIONS = ("--device", "cuda", "--dtype", "bfloat16", "--num-kv-tokens", "2048")
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}


def ranks() -> Ranks:
    """The engine of two ranks is on the first two GPUs."""
    common: dict[str, Any] = {"options": OPTIONS, "buffer_mb": 4, "deadline_s": 20}
    if NUM_GPUS >= 4:
        alone = {"CUDA_VISIBLE_DEVICES": "2"}
        return Ranks(trainer="cuda:3", everywhere=ENVIRONMENT, single=alone, **common)
    # ENVIRONMENT turns multicast off: NCCL 2.30.7 does so only if the last two ranks share a device.
    sharing = ENVIRONMENT | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return Ranks(trainer="cuda:1", everywhere=sharing, **common)


def test_engines_of_one_rank_and_of_two_get_the_same_update(tmp_path: Path) -> None:
    old, new = write_checkpoints(tmp_path, "qwen3", **SIZES)
    sent = check_updates(old, new, ranks())
    assert [each["backend"] for each in sent] == ["nccl", "nccl"]
    for each in sent:
        print(json.dumps(each))
