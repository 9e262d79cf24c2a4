import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from segue.checkpoint import load, safetensors
from segue.distributed.info import TPInfo
from segue.errors import ModelFileError
from tests.checkpoint import tiny

SIZES = {"llama": 2, "llama-biases": 2, "qwen2": 2, "qwen3": 4, "qwen3-moe": 8}
MIB = 1 << 20

Change = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: tiny.make(kind) for kind in tiny.MODELS}


@pytest.fixture(scope="module")
def checkpoints(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tiny.save(model, tmp_path_factory.mktemp(kind)) for kind, model in models.items()}


@pytest.fixture
def sharded(models: dict[str, Any], tmp_path: Path) -> Path:
    return tiny.save(models["qwen2"], tmp_path, max_shard_size="20KB")


@pytest.fixture
def changed(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str, Change], Path]:
    """Returns a function that copies a checkpoint and changes its tensors with the given function."""

    def make(kind: str, change: Change) -> Path:
        shutil.copytree(checkpoints[kind], tmp_path, dirs_exist_ok=True)
        tensors = load_file(tmp_path / safetensors.SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / safetensors.SINGLE)
        return tmp_path

    return make


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_loads_every_architecture(kind: str, models: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    _, arena = tiny.load(checkpoints[kind])
    tiny.assert_equal(arena, tiny.expected(models[kind], TPInfo()))


@pytest.mark.parametrize(("kind", "size"), SIZES.items())
def test_each_rank_loads_its_shard(
    kind: str, size: int, models: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    for rank in range(size):
        tp = TPInfo(rank, size)
        _, arena = tiny.load(checkpoints[kind], tp=tp)
        tiny.assert_equal(arena, tiny.expected(models[kind], tp))


def test_loads_a_sharded_checkpoint(models: dict[str, Any], sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    _, arena = tiny.load(sharded)
    tiny.assert_equal(arena, tiny.expected(models["qwen2"], TPInfo()))


def test_loads_files_with_other_names(models: dict[str, Any], sharded: Path) -> None:
    (sharded / safetensors.INDEX).unlink()
    _, arena = tiny.load(sharded)
    tiny.assert_equal(arena, tiny.expected(models["qwen2"], TPInfo()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_is_cast_to_the_engines_dtype(
    dtype: torch.dtype, models: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    _, arena = tiny.load(checkpoints["llama"], dtype=dtype)
    tiny.assert_equal(arena, tiny.expected(models["llama"], TPInfo()), dtype)


def test_bfloat16_is_cast_to_float32(models: dict[str, Any], changed: Callable[[str, Change], Path]) -> None:
    path = changed("qwen3", lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    _, arena = tiny.load(path)
    expected = tiny.expected(models["qwen3"], TPInfo())
    tiny.assert_equal(arena, {name: weight.bfloat16() for name, weight in expected.items()})


def test_tensors_larger_than_the_buffer_are_copied_in_blocks(
    models: dict[str, Any], checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "BounceBuffers", lambda device, _: safetensors.BounceBuffers(device, 1000))
    monkeypatch.setattr(safetensors, "_CHUNK", 1000)
    for dtype, tp in ((torch.bfloat16, TPInfo()), (torch.float32, TPInfo(1, 2))):
        _, arena = tiny.load(checkpoints["llama"], tp=tp, dtype=dtype)
        tiny.assert_equal(arena, tiny.expected(models["llama"], tp), dtype)


def test_experts_may_be_stacked(models: dict[str, Any], changed: Callable[[str, Change], Path]) -> None:
    state = models["qwen3-moe"].state_dict()

    def stack(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors.update({name: weight.contiguous() for name, weight in state.items()})

    path = changed("qwen3-moe", stack)
    for tp in (TPInfo(), TPInfo(1, 2)):
        _, arena = tiny.load(path, tp=tp)
        tiny.assert_equal(arena, tiny.expected(models["qwen3-moe"], tp))


def test_the_head_of_a_tied_model_may_be_in_the_file(
    models: dict[str, Any], changed: Callable[[str, Change], Path]
) -> None:
    path = changed(
        "llama-tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    _, arena = tiny.load(path)
    tiny.assert_equal(arena, tiny.expected(models["llama-tied"], TPInfo()))


@pytest.mark.parametrize(
    ("changed_at", "words"), [(-1, "differs from 'model.embed_tokens.weight'"), (None, "has shape")]
)
def test_a_tied_model_with_a_different_head_is_an_error(
    changed_at: int | None,
    words: str,
    changed: Callable[[str, Change], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(safetensors, "_COMPARE_CHUNK", 1000)

    def add(tensors: dict[str, Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        if changed_at is not None:
            head.view(-1)[changed_at] += 1
        tensors["lm_head.weight"] = head if changed_at is not None else head[1:]

    path = changed("llama-tied", add)
    with pytest.raises(ModelFileError, match=f"{path / safetensors.SINGLE}: tensor 'lm_head.weight' {words}"):
        tiny.load(path)


def test_inverse_frequencies_in_the_file_are_ignored(changed: Callable[[str, Change], Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tiny.load(changed("llama", lambda tensors: tensors.update({name: torch.ones(4)})))


def test_the_model_is_bound_to_the_arena(checkpoints: dict[str, Path]) -> None:
    model, arena = tiny.load(checkpoints["llama"])
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == arena.view(name).data_ptr()


def test_progress_is_shown_when_asked(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.load(checkpoints["llama"], progress=True)
    assert "Loading weights: 100%" in capfd.readouterr().err


def test_no_progress_without_a_terminal(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.load(checkpoints["llama"])
    assert capfd.readouterr().err == ""


def test_a_directory_without_weights_is_named(models: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"{tmp_path} has no \\*.safetensors file"):
        tiny.load(tiny.save_config(models["llama"], tmp_path))


def test_a_missing_tensor_is_named_with_its_file(changed: Callable[[str, Change], Path]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = changed("llama", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelFileError, match=f"{path / safetensors.SINGLE} lacks tensor '{name}'"):
        tiny.load(path)


def test_many_missing_tensors_are_counted(changed: Callable[[str, Change], Path]) -> None:
    def keep_norms(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "norm" not in name]:
            del tensors[name]

    with pytest.raises(ModelFileError, match=r"'model.embed_tokens.weight'.* and \d+ more"):
        tiny.load(changed("llama", keep_norms))


def test_a_wrong_shape_is_named_with_its_file(changed: Callable[[str, Change], Path]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    path = changed("llama", lambda tensors: tensors.update({name: torch.zeros(48, 47)}))
    file = path / safetensors.SINGLE
    expected = f"{file}: tensor '{name}' has shape \\[48, 47\\]; config.json asks for \\[48, 48\\]"
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(path)


def test_an_unknown_tensor_is_named_with_its_file(changed: Callable[[str, Change], Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    path = changed("llama", lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(ModelFileError, match=f"{path / safetensors.SINGLE}: tensor '{name}' is not part"):
        tiny.load(path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3-moe", "model.layers.0.mlp.experts.2.up_proj.weight"),
    ],
)
def test_non_finite_values_are_refused_with_tensor_and_count(
    kind: str, name: str, value: float, changed: Callable[[str, Change], Path]
) -> None:
    path = changed(kind, lambda tensors: tensors[name].view(-1)[-3:].fill_(value))
    expected = f"{path}: tensor '{name}' has 3 values that are NaN or infinite in float32; a model with such"
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(path)


def test_other_non_finite_tensors_are_counted(changed: Callable[[str, Change], Path]) -> None:
    path = changed(
        "llama", lambda tensors: [tensor.view(-1)[0].fill_(torch.nan) for tensor in tensors.values()]
    )
    with pytest.raises(ModelFileError, match=r"has 1 values .*, and \d+ other tensors have such values too"):
        tiny.load(path)


def test_values_too_large_for_a_dtype_are_refused_only_in_that_dtype(
    changed: Callable[[str, Change], Path],
) -> None:
    path = changed("llama", lambda tensors: tensors["model.norm.weight"][7].fill_(1e5))
    tiny.load(path, dtype=torch.bfloat16)
    expected = "'model.norm.weight' has 1 values that are NaN or infinite in float16.*--dtype bfloat16"
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(path, dtype=torch.float16)


def test_integer_weights_are_an_error_that_names_the_tensor(changed: Callable[[str, Change], Path]) -> None:
    path = changed("llama", lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ModelFileError, match=r"tensor 'model.norm.weight' has type I8; supported: F64, F32"):
        tiny.load(path)


def test_weights_given_twice_are_an_error(changed: Callable[[str, Change], Path]) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    path = changed("qwen3-moe", lambda tensors: tensors.update({name: torch.zeros(3, 48, 24)}))
    with pytest.raises(ModelFileError, match=r"two names: see the names that fill layers.0.mlp.experts.down"):
        tiny.load(path)


def test_a_truncated_file_names_the_first_incomplete_tensor(changed: Callable[[str, Change], Path]) -> None:
    path = changed("llama", lambda tensors: None) / safetensors.SINGLE
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    header.pop("__metadata__", None)
    name, fields = sorted(header.items(), key=lambda item: item[1]["data_offsets"])[7]
    os.truncate(path, 8 + header_size + fields["data_offsets"][1] - 1)
    with pytest.raises(ModelFileError, match=f"{path} is truncated: tensor '{name}' ends"):
        tiny.load(path.parent)


def test_a_missing_file_of_a_checkpoint_is_named_with_one_of_its_tensors(sharded: Path) -> None:
    places = json.loads((sharded / safetensors.INDEX).read_text())["weight_map"]
    name = "model.layers.1.mlp.down_proj.weight"
    (sharded / places[name]).unlink()
    with pytest.raises(ModelFileError, match=f"{sharded / places[name]} is missing; .* tensor '") as caught:
        tiny.load(sharded)
    named = str(caught.value).split("tensor '")[1].split("'")[0]
    assert places[named] == places[name]


def test_a_file_without_an_indexed_tensor_is_named_with_the_tensor(sharded: Path) -> None:
    places = json.loads((sharded / safetensors.INDEX).read_text())["weight_map"]
    name = "model.norm.weight"
    path = sharded / places[name]
    save_file({key: weight for key, weight in load_file(path).items() if key != name}, path)
    with pytest.raises(ModelFileError, match=f"{path} has no tensor '{name}'"):
        tiny.load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"weight_map": 3}'])
def test_a_corrupt_index_is_named(sharded: Path, text: str) -> None:
    (sharded / safetensors.INDEX).write_text(text)
    with pytest.raises(ModelFileError, match=f"{sharded / safetensors.INDEX} is corrupt"):
        tiny.load(sharded)


@pytest.mark.parametrize("place", ["../b", "/etc/passwd", "a/b", "..", ""])
def test_an_index_that_points_elsewhere_is_corrupt_and_names_the_tensor(sharded: Path, place: str) -> None:
    (sharded / safetensors.INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
    expected = f"{safetensors.INDEX} is corrupt: tensor 'a' .* it must be a file name, without a directory"
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(sharded)


def test_the_same_tensor_in_two_files_is_an_error(sharded: Path) -> None:
    (sharded / safetensors.INDEX).unlink()
    save_file({"model.norm.weight": torch.ones(48)}, sharded / "z.safetensors")
    with pytest.raises(ModelFileError, match=r"z.safetensors both hold tensor 'model.norm.weight'"):
        tiny.load(sharded)


def test_an_error_leaves_no_file_open(changed: Callable[[str, Change], Path]) -> None:
    path = changed("llama", lambda tensors: tensors.pop("model.norm.weight"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelFileError):
        tiny.load(path)
    assert len(os.listdir("/proc/self/fd")) == before


MEASURE = """
import json, sys
from pathlib import Path
import torch
from segue.distributed.info import TPInfo
from segue.memory.rank_memory import PrivateMemory
from segue.models.decoder import build_model
from segue.checkpoint.load import load_weights
from segue.checkpoint.source import resolve

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

torch.set_num_threads(1)
source = resolve(sys.argv[1], sys.argv[2], sys.argv[3])
model = build_model(source.config, dtype=torch.bfloat16)
before = memory("VmRSS")
memory_of_rank = PrivateMemory(torch.device("cpu"))
arena = load_weights(model, source.config, source, TPInfo(), memory_of_rank, torch.bfloat16)
print(json.dumps({"grown": memory("VmHWM") - before, "arena": arena.num_bytes}))
"""


def growth(path: Path, load_format: str, cache_dir: Path) -> dict[str, int]:
    """Returns the bytes of the arena, and of the peak while a process loads it, file pages included."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), load_format, str(cache_dir)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return dict(json.loads(result.stdout.splitlines()[-1]))


def assert_no_second_copy(found: dict[str, int]) -> None:
    assert found["arena"] > 100 * MIB, "the arena is too small to detect a second copy"
    assert found["grown"] <= 1.2 * found["arena"] + 64 * MIB


def test_loading_safetensors_makes_no_second_copy(tmp_path: Path) -> None:
    # Weights are bfloat16 and are read in place; the float32 embeddings are cast on the way.
    with torch.device("meta"):
        model = tiny.make("llama-tied", vocab_size=24_000, hidden_size=960, intermediate_size=4608)
    tiny.save_config(model, tmp_path)
    weights = {
        name: torch.ones(weight.shape, dtype=torch.bfloat16) for name, weight in model.state_dict().items()
    }
    del weights["lm_head.weight"]
    save_file(
        {"model.embed_tokens.weight": weights.pop("model.embed_tokens.weight").float()},
        tmp_path / "a.safetensors",
    )
    save_file(weights, tmp_path / "b.safetensors")
    assert_no_second_copy(growth(tmp_path, "safetensors", tmp_path))


@pytest.mark.slow
def test_converting_the_bundled_model_makes_no_second_copy(bundled_path: Path, tmp_path: Path) -> None:
    assert_no_second_copy(growth(bundled_path, "gguf", tmp_path))
