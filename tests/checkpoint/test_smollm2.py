"""The bundled model's weights are compared with a committed checksum and, slowly, with transformers."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from segue.checkpoint import bundled
from segue.checkpoint.source import ModelSource, resolve
from segue.distributed.info import TPInfo
from segue.models.config import ModelConfig
from tests.checkpoint import tiny

# SHA-256 over names, shapes and values of the bfloat16 tensors by name; the slow test checks the values.
CHECKSUM = "2fb28472c1ff7d7e731f2cdb2fe8bac941190d081c5a3c19fa61831126c2bac8"


@pytest.fixture(scope="module")
def source(bundled_path: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return resolve(str(bundled_path), "auto", tmp_path_factory.mktemp("cache"))


def test_its_configuration_is_known_without_its_file(source: ModelSource) -> None:
    known = ModelConfig.from_hf(bundled.CONFIG)
    assert replace(known, dtype=source.config.dtype) == source.config


def test_converted_weights_have_the_committed_checksum(source: ModelSource) -> None:
    tiny.load_source(source, dtype=torch.bfloat16)
    digest = hashlib.sha256()
    with safe_open(source.directory / "weights-bfloat16.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.view(torch.int16).numpy().data)
    assert digest.hexdigest() == CHECKSUM


@pytest.fixture(scope="module")
def theirs(bundled_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        bundled_path.parent, gguf_file=bundled_path.name, dtype=torch.float32
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 3)])
def test_every_tensor_equals_that_of_transformers(
    dtype: torch.dtype, tp: TPInfo, source: ModelSource, theirs: Any
) -> None:
    _, arena = tiny.load_source(source, tp=tp, dtype=dtype)
    tiny.assert_equal(arena, tiny.expected(theirs, tp, source.config), dtype)
