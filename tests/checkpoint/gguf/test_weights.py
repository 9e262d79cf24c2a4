import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from segue.checkpoint.gguf import weights as gguf_weights
from segue.checkpoint.gguf.file import GGUFFile, GGUFTensor
from segue.checkpoint.gguf.weights import Source
from segue.distributed.info import TPInfo
from segue.errors import CacheDirectoryError, ModelFileError
from tests.checkpoint import tiny, tiny_gguf

QUANTISABLE = [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
DEQUANTISABLE = [kind for kind in Type if kind in gguf.quants._type_traits or kind in (Type.F32, Type.F16)]
WIDE = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}


def model(kind: str, **options: Any) -> Any:
    sizes = {**WIDE, "vocab_size": tiny_gguf.vocab_size(), "num_hidden_layers": 2, **options}
    if kind == "qwen3-moe":
        sizes |= {"mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True}
    return tiny.make(kind, **sizes)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_loads_the_weights_that_were_written(kind: str, tmp_path: Path, cache_dir: Path) -> None:
    original = model(kind)
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    _, arena = tiny.load(path, cache_dir=cache_dir)
    tiny.assert_equal(arena, tiny.expected(original, TPInfo()))


def test_each_rank_loads_its_shard(tmp_path: Path, cache_dir: Path) -> None:
    original = model("qwen3-moe")
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    for rank in range(4):
        _, arena = tiny.load(path, tp=TPInfo(rank, 4), cache_dir=cache_dir)
        tiny.assert_equal(arena, tiny.expected(original, TPInfo(rank, 4)))


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_equal_those_that_transformers_loads(
    kind: str, dtype: torch.dtype, tmp_path: Path, cache_dir: Path
) -> None:
    sizes = {"head_dim": 128, "moe_intermediate_size": 768} if kind == "qwen3-moe" else {}
    original = tiny.make(
        kind,
        **{
            **WIDE,
            "vocab_size": tiny_gguf.vocab_size(),
            "num_hidden_layers": 1,
            "mlp_only_layers": [],
            **sizes,
        },
    )
    path = tiny_gguf.write(tmp_path / "model.gguf", original, types=Type.Q4_1)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    _, arena = tiny.load(path, dtype=dtype, cache_dir=cache_dir)
    tiny.assert_equal(arena, tiny.expected(theirs, TPInfo(), tiny.config_of(original)), dtype)


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_every_type_that_the_gguf_package_writes_is_read(kind: Type, tmp_path: Path, cache_dir: Path) -> None:
    original = model("qwen2")
    path = tiny_gguf.write(tmp_path / "model.gguf", original, types=kind)
    _, arena = tiny.load(path, cache_dir=cache_dir)
    up = original.model.layers[1].mlp.up_proj.weight.detach().numpy()
    expected = gguf.dequantize(gguf.quants.quantize(up, kind), kind)
    assert torch.equal(arena.view("layers.1.mlp.gate_up.weight")[64:], torch.from_numpy(expected))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes give scales that overflow
@pytest.mark.parametrize("kind", DEQUANTISABLE)
def test_dequantising_in_blocks_equals_dequantising_at_once(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns, rows = max(block, 256), 7
    data = np.random.default_rng(int(kind)).integers(0, 255, (rows, columns // block * size), np.uint8)
    (tmp_path / "raw").write_bytes(b"before" + data.tobytes())
    tensor = GGUFTensor(name="w", type=kind, shape=(rows, columns), start=6)
    found = convert(tmp_path, tensor, Source(name="w", shape=(rows, columns), tensor=tensor), monkeypatch)
    expected = torch.from_numpy(np.array(gguf.dequantize(data, kind)))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def convert(directory: Path, tensor: GGUFTensor, source: Source, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Converts one tensor, a few rows at a time."""
    monkeypatch.setattr(gguf_weights, "_BLOCK_ELEMENTS", 3 * tensor.shape[-1])
    monkeypatch.setattr(
        GGUFFile, "read", lambda path: GGUFFile(path=path, metadata={}, tensors={"w": tensor})
    )
    monkeypatch.setattr(gguf_weights, "_sources", lambda file, config: [source])
    config = tiny.config_of(model("llama"))
    path = gguf_weights.convert(directory / "raw", directory, config, torch.float32)
    return load_file(path)[source.name]


def test_the_rows_of_heads_are_reordered_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(16, dtype=torch.float32)[:, None].expand(16, 4).contiguous()
    (tmp_path / "raw").write_bytes(rows.numpy().tobytes())
    tensor = GGUFTensor(name="w", type=Type.F32, shape=(16, 4), start=0)
    source = Source(name="w", shape=(16, 4), tensor=tensor, head_dim=8)
    found = convert(tmp_path, tensor, source, monkeypatch)
    assert found[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path, cache_dir: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    content = path.read_bytes()
    start = content.index(b"blk.1.attn_norm.weight") + len(b"blk.1.attn_norm.weight") + 4 + 8
    path.write_bytes(content[:start] + int(Type.I32).to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelFileError, match=f"{path}: tensor 'blk.1.attn_norm.weight' has type I32"):
        tiny.load(path, cache_dir=cache_dir)


@pytest.mark.parametrize(
    "name",
    ["blk.0.ssm_conv1d.weight", "blk.2.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_q.scale", "None", ""],
)
def test_a_tensor_that_is_not_part_of_the_model_is_named(name: str, tmp_path: Path, cache_dir: Path) -> None:
    extra = {name: np.zeros((96, 96), np.float32)}
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"), tensors=extra)
    with pytest.raises(ModelFileError, match=f"{path}: tensor '{name}' is not part of the model that its"):
        tiny.load(path, cache_dir=cache_dir)
    assert not list(cache_dir.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.ffn_up_exps.weight", [2, 32, 96], r"\[3, 32, 96\]"),
        ("blk.0.ffn_up_exps.weight", [32, 96], r"\[3, 32, 96\]"),
        ("blk.0.ffn_gate_inp.weight", [3, 64], r"\[3, 96\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    name: str, shape: list[int], expected: str, tmp_path: Path, cache_dir: Path
) -> None:
    extra = {name: np.zeros(shape, np.float32)}
    path = tiny_gguf.write(tmp_path / "model.gguf", model("qwen3-moe"), tensors=extra)
    message = f"{path} is corrupt: tensor '{name}' has shape {re.escape(str(shape))}.* asks for {expected}"
    with pytest.raises(ModelFileError, match=message):
        tiny.load(path, cache_dir=cache_dir)
    assert not list(cache_dir.rglob("*.safetensors"))


def test_a_truncated_file_names_the_tensor(tmp_path: Path, cache_dir: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    last = list(GGUFFile.read(path).tensors.values())[-1]
    os.truncate(path, last.end - 1)
    with pytest.raises(ModelFileError, match=f"{path} is truncated: tensor '{last.name}'"):
        tiny.load(path, cache_dir=cache_dir)


def test_a_file_is_converted_once(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    tiny.load(path, cache_dir=cache_dir)
    monkeypatch.setattr(GGUFFile, "read", lambda path: pytest.fail("the file was read again"))
    tiny.load(path, cache_dir=cache_dir)


@pytest.mark.parametrize("size", [0, 5000])
def test_a_truncated_conversion_is_converted_again(size: int, tmp_path: Path, cache_dir: Path) -> None:
    original = model("llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    tiny.load(path, cache_dir=cache_dir)
    (weights,) = cache_dir.rglob("weights-*.safetensors")
    os.truncate(weights, size)
    _, arena = tiny.load(path, cache_dir=cache_dir)
    tiny.assert_equal(arena, tiny.expected(original, TPInfo()))


def overwrite(path: Path, position: int, content: bytes) -> None:
    """Damages a file without changing its length or times."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_damaged_weights_are_converted_again_and_logged(
    place: str, tmp_path: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = model("llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    tiny.load(path, cache_dir=cache_dir)
    assert not caplog.records
    (weights,) = cache_dir.rglob("weights-*.safetensors")
    size = weights.stat().st_size
    if place == "header":  # swap two tensors of equal shape
        content = weights.read_bytes()
        names = [b"model.layers.0.mlp.gate_proj.weight", b"model.layers.1.mlp.gate_proj.weight"]
        positions = [content.index(name) for name in names]
        for position, name in zip(positions, names[::-1], strict=True):
            overwrite(weights, position, name)
    else:
        overwrite(weights, size // 2 if place == "middle" else size - 4096, b"\xff" * 4096)
    for _ in range(2):
        _, arena = tiny.load(path, cache_dir=cache_dir)
        tiny.assert_equal(arena, tiny.expected(original, TPInfo()))
    (record,) = caplog.records
    expected = f"{weights.parent} is damaged: {weights.name} differs from what was written; converting {path}"
    assert expected in record.getMessage()


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", '{"weights-float32.safetensors": [1]}', "[" * 100_000]
)
def test_a_missing_or_broken_checksum_record_is_written_again(
    content: str | None, tmp_path: Path, cache_dir: Path
) -> None:
    original = model("llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    tiny.load(path, cache_dir=cache_dir)
    (record,) = cache_dir.rglob("weights-*.checksums.json")
    before = record.read_text()
    record.unlink() if content is None else record.write_text(content)
    _, arena = tiny.load(path, cache_dir=cache_dir)
    tiny.assert_equal(arena, tiny.expected(original, TPInfo()))
    assert record.read_text() == before


def test_non_finite_values_in_the_file_name_the_file(tmp_path: Path, cache_dir: Path) -> None:
    original = model("llama")
    original.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    expected = f"{path}: tensor 'model.layers.1.mlp.up_proj.weight' has 1 values that are NaN or infinite"
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(path, cache_dir=cache_dir)


def test_another_dtype_is_converted_from_the_gguf_file(tmp_path: Path, cache_dir: Path) -> None:
    original = model("llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    tiny.load(path, dtype=torch.bfloat16, cache_dir=cache_dir)
    _, arena = tiny.load(path, dtype=torch.float32, cache_dir=cache_dir)
    tiny.assert_equal(arena, tiny.expected(original, TPInfo()))


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    monkeypatch.setattr(gguf_weights.gguf, "dequantize", lambda data, kind: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.load(path, cache_dir=cache_dir)
    assert not [
        name
        for name in os.listdir(next(cache_dir.glob("converted/*/*")))
        if "weights" in name and "lock" not in name
    ]


def test_progress_is_shown_when_asked(
    tmp_path: Path, cache_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    tiny.load(path, cache_dir=cache_dir, progress=True)
    assert "Converting model.gguf: 100%" in capfd.readouterr().err


def test_an_unwritable_cache_names_the_directory_and_the_remedy(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    (tmp_path / "occupied").write_text("a file, not a directory")
    with pytest.raises(CacheDirectoryError, match=f"{tmp_path / 'occupied'}.*SEGUE_CACHE_DIR"):
        tiny.load(path, cache_dir=tmp_path / "occupied")


def test_a_full_disk_is_a_cache_error(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_weights, "open_writer", full)
    with pytest.raises(CacheDirectoryError, match="No space left on device"):
        tiny.load(path, cache_dir=cache_dir)


RACE = """
import sys, torch
from tests.checkpoint import tiny
from pathlib import Path
print(tiny.load(Path(sys.argv[1]), cache_dir=Path(sys.argv[2]))[1].checksum())
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["first", "again"])
def test_processes_that_race_all_succeed(damaged: bool, tmp_path: Path, cache_dir: Path) -> None:
    original = model("llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", original)
    if damaged:
        tiny.load(path, cache_dir=cache_dir)
        for file in next(cache_dir.glob("converted/*/*")).iterdir():
            if file.suffix != ".lock":
                overwrite(file, file.stat().st_size // 2, b"\xff")
    command = [sys.executable, "-c", RACE, str(path), str(cache_dir)]

    def run(_: int) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    _, arena = tiny.load(path, cache_dir=cache_dir)
    tiny.assert_equal(arena, tiny.expected(original, TPInfo()))
    assert results == [f"{arena.checksum()}\n"] * 2
    assert not [path for path in cache_dir.rglob(".*") if not path.name.endswith(".lock")]


def test_a_tensor_that_does_not_fit_the_model_is_refused_before_it_takes_memory(
    tmp_path: Path, cache_dir: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", model("llama"))
    large = GGUFFile.read(path).tensors["output_norm.weight"]
    data, name = path.read_bytes(), b"output_norm.weight"
    at = data.index(name) + len(name) + 4  # after the number of dimensions
    columns = 1 << 40
    path.write_bytes(data[:at] + columns.to_bytes(8, "little") + data[at + 8 :])
    os.truncate(path, large.start + columns * 4)
    directory = cache_dir / "converted"
    directory.mkdir(parents=True)
    config = tiny.config_of(model("llama"))
    with pytest.raises(
        ModelFileError, match=r"output_norm.weight' has shape \[1099511627776\].*asks for \[96\]"
    ):
        gguf_weights.convert(path, directory, config, torch.float32)
    assert not list(directory.glob("*.safetensors"))
