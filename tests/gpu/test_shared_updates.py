"""Engines on a GPU whose weights are updated while others stand by, and that are killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.syncing import write_checkpoints
from tests.e2e.test_shared_updates import check_successors, checksum_of, cohorts
from tests.gpu.test_one_group import SIZES
from tests.weight_update.conftest import trainer_address as trainer_address

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]


def test_what_a_successor_serves_is_what_the_service_has(
    tmp_path: Path, trainer_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_checkpoints(tmp_path / "checkpoints", "qwen3", 3, **SIZES)
    checkpoints = [(path, checksum_of(path, torch.bfloat16)) for path in paths]
    options = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 8}
    with cohorts(tmp_path, monkeypatch, devices="all", **options) as new_cohort:
        check_successors(tmp_path, trainer_address, checkpoints, new_cohort)
