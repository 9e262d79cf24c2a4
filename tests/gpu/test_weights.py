import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.checkpoint.load import load_weights
from segue.checkpoint.source import ModelSource, resolve
from segue.distributed.info import TPInfo
from segue.errors import ModelFileError
from segue.memory.arena import Arena
from segue.memory.rank_memory import PrivateMemory
from segue.models.decoder import build_model
from tests.checkpoint import tiny

pytestmark = pytest.mark.gpu

RANKS = [TPInfo(), TPInfo(1, 2)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Large enough that tensors take both staging buffers several times.
    model = tiny.make("qwen3-moe", vocab_size=70_000, hidden_size=192)
    return tiny.save(model, tmp_path_factory.mktemp("model"))


def load(source: ModelSource, device: str, tp: TPInfo, dtype: torch.dtype) -> Arena:
    model = build_model(source.config, dtype=dtype, collectives=tiny.Rank(tp))
    return load_weights(model, source.config, source, tp, PrivateMemory(torch.device(device)), dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_that_are_not_finite_are_refused(directory: Path, tmp_path: Path, device: str) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 5:7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    source = resolve(str(tmp_path), "auto", "/nonexistent")
    with pytest.raises(ModelFileError, match=f"tensor '{name}' has 2 values that are NaN or infinite"):
        load(source, device, TPInfo(), torch.bfloat16)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_holds_what_the_cpu_would(
    directory: Path, load_format: str, tp: TPInfo, dtype: torch.dtype
) -> None:
    source = resolve(str(directory), load_format, "/nonexistent")
    on_cpu, on_cuda = (load(source, device, tp, dtype) for device in ("cpu", "cuda"))
    for name in on_cpu.layout.table:
        assert torch.equal(on_cpu.view(name), on_cuda.view(name).cpu()), name
    assert on_cuda.checksum() == on_cpu.checksum()
