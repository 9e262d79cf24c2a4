"""The layers that `bench.token_layers` measures."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench import suite
from bench.token_layers import main, parse_plan, shapes_of
from segue.kernels.gemv_plan import GemvPlan
from segue.models.config import ModelConfig
from segue.models.decoder import build_model


@pytest.mark.parametrize("size", ["0.6b", "8b"])
def test_the_weights_have_the_shapes_of_the_model(size: str) -> None:
    config = ModelConfig.from_hf(json.loads((Path(suite.model_dir(size)) / "config.json").read_text()))
    parameters = build_model(config, dtype=torch.bfloat16).layers[1].named_parameters()
    found = {name: tuple(each.shape) for name, each in parameters if each.dim() == 2}
    expected = shapes_of(config)
    assert found == {
        **{f"attn.{name}.weight": expected[name] for name in ("qkv", "o")},
        **{f"mlp.{name}.weight": expected[name] for name in ("gate_up", "down")},
    }


def test_plans_are_named() -> None:
    assert parse_plan("gate_up=4,3,8") == ("gate_up", GemvPlan(block_n=4, per_sm=3, warps=8))
    for text in ("attention=1,2,3", "qkv=1,2", "head=1,2,3", "qkv=a,2,3"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=ROWS,PROGRAMS,WARPS"):
            parse_plan(text)


def test_a_model_with_experts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["30b-a3b"])
    assert (
        "30b-a3b has experts, which this chain of layers lacks; give a dense model" in capsys.readouterr().err
    )
