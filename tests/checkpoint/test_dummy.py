from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from segue.checkpoint import dummy
from segue.distributed.info import TPInfo
from segue.memory.arena import Arena
from segue.models.destination import Destination
from tests.checkpoint import tiny

SIZES = {"llama-biases": 2, "llama-tied": 2, "qwen3": 4, "qwen3-moe": 8}

Load = Callable[..., Arena]


def values(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor called `name`, in float32."""
    target = torch.empty(shape)
    destination = Destination(values=target, source=tuple(slice(0, size) for size in shape))
    for _ in dummy._fill(destination, seed, name, shape):
        pass
    return target


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Returns a function that loads dummy weights of a tiny model that has only a config."""

    def make(kind: str, tp: TPInfo | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arena:
        with torch.device("meta"):
            tiny.save_config(tiny.make(kind), tmp_path)
        return tiny.load(tmp_path, load_format="dummy", tp=tp, dtype=dtype, seed=seed)[1]

    return make


@pytest.mark.parametrize(("kind", "size"), SIZES.items())
def test_ranks_hold_slices_of_the_weights_of_one_process(kind: str, size: int, load: Load) -> None:
    model = tiny.make(kind)
    config = tiny.config_of(model)
    state = model.state_dict()
    for name, weight in state.items():
        if name.endswith("experts.gate_up_proj"):
            rows = weight.shape[1] // 2
            for expert in range(len(weight)):
                stem = f"{name.removesuffix('gate_up_proj')}{expert}."
                weight[expert, :rows] = values(0, f"{stem}gate_proj.weight", weight[expert, :rows].shape)
                weight[expert, rows:] = values(0, f"{stem}up_proj.weight", weight[expert, rows:].shape)
        elif name.endswith("experts.down_proj"):
            for expert in range(len(weight)):
                full = f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"
                weight[expert] = values(0, full, weight[expert].shape)
        elif not (name == "lm_head.weight" and config.tie_embeddings):
            weight.copy_(values(0, name, tuple(weight.shape)))
    for tp in (TPInfo(), *(TPInfo(rank, size) for rank in range(size))):
        tiny.assert_equal(load(kind, tp), tiny.expected(model, tp))


def test_values_do_not_depend_on_the_block_size(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load("llama").checksum()
    monkeypatch.setattr(dummy, "_BLOCK_ELEMENTS", 100)
    assert load("llama").checksum() == before


def test_values_are_pinned() -> None:
    found = values(3, "model.layers.1.mlp.up_proj.weight", (2, 2)).flatten().tolist()
    assert found == pytest.approx(VALUES, abs=1e-9)


VALUES = [0.007983732968568802, 0.016914688050746918, 0.017997227609157562, 0.003653572639450431]


def test_another_seed_gives_other_values(load: Load) -> None:
    assert load("llama", seed=1).checksum() != load("llama").checksum()


def test_another_name_gives_other_values() -> None:
    first, second = (values(0, name, (64, 64)) for name in ("a.weight", "b.weight"))
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.05


def test_weights_are_small_and_normal() -> None:
    found = values(0, "lm_head.weight", (1000, 1000)) / dummy.STD
    assert abs(found.mean()) < 0.01
    assert found.std() == pytest.approx(1, abs=0.01)
    assert (found.abs() < 1).float().mean() == pytest.approx(0.675, abs=0.015)  # uniform: 0.577


def test_rows_and_columns_are_independent() -> None:
    found = values(0, "lm_head.weight", (400, 400))
    for matrix in (found, found.T):
        correlation = torch.corrcoef(matrix[:50]) - torch.eye(50)
        assert correlation.abs().max() < 0.3


def test_norms_are_near_one() -> None:
    found = values(0, "model.layers.0.input_layernorm.weight", (2000,))
    assert found.mean() == pytest.approx(1, abs=0.01)
    assert found.std() == pytest.approx(dummy.STD, rel=0.1)


def test_bfloat16_is_float32_rounded(load: Load) -> None:
    exact = load("qwen2")
    tiny.assert_equal(
        load("qwen2", dtype=torch.bfloat16),
        {name: exact.view(name) for name in exact.layout.table},
        torch.bfloat16,
    )


def test_vocabulary_padding_is_zero(load: Load) -> None:
    arena = load("llama", TPInfo(1, 2))  # 131 tokens: 128 rows per rank
    assert not arena.view("embed.weight")[3:].any()
    assert arena.view("embed.weight")[2].any()
