"""Each figure of README's table is a stored result, rounded; README's statements on `make test` are true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_correctness

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
Figures = tuple[list[float], list[float]]  # of Segue, of vLLM


def peers(model: str, *names: str) -> Figures:
    figures = stored(f"gpu_peers_{model}")["figures"]
    return [figures[name]["ours"] for name in names], [figures[name]["theirs"] for name in names]


def http(figure: Callable[[Any], float]) -> Figures:
    sides = stored("gpu_http")["sides"]
    return ([figure(sides["ours"]["loads"][load]) for load in ("50%", "80%")]), (
        [figure(sides["theirs"]["loads"][load]) for load in ("50%", "80%")]
    )


def moe(*tokens: int) -> Figures:
    layers = {int(layer["tokens"]): layer for layer in stored("gpu_moe")["layers"]}
    return [layers[n]["segue_us"] for n in tokens], [layers[n]["vllm_us"] for n in tokens]


def ready() -> Figures:
    sides = stored("gpu_http")["sides"]
    return [sides["ours"]["ready_s"]], [sides["theirs"]["ready_s"]]


def stored(name: str) -> Any:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


DECODE = ("decode bs=1", "decode bs=32", "decode bs=256")
FIRST = ("first_token prompt=16", "first_token prompt=256", "first_token prompt=1024")
# The stored figures of each row, by the words that the row begins with, in the order of the rows.
ROWS: dict[str, Callable[[], Figures]] = {
    "Qwen3-0.6B, 256 requests": lambda: peers("0.6b", "offline256"),
    "Qwen3-0.6B, a decode step": lambda: peers("0.6b", *DECODE),
    "Qwen3-0.6B, first token": lambda: peers("0.6b", *FIRST),
    "Qwen3-0.6B, prefill": lambda: peers("0.6b", "prefill 64x2048"),
    "Qwen3-4B, 256 requests": lambda: peers("4b", "offline256"),
    "Qwen3-4B, a decode step": lambda: peers("4b", *DECODE),
    "Qwen3-8B, 256 requests": lambda: peers("8b", "offline256"),
    "Qwen3-8B, a decode step": lambda: peers("8b", *DECODE),
    "Qwen3-8B, first token": lambda: peers("8b", *FIRST),
    "Qwen3-8B, prefill": lambda: peers("8b", "prefill 64x2048"),
    "Llama-3.1-8B, 256 requests": lambda: peers("llama-8b", "offline256"),
    "Llama-3.1-8B, a decode step": lambda: peers("llama-8b", *DECODE),
    "Qwen3-30B-A3B, 256 requests": lambda: peers("30b-a3b", "offline256"),
    "Qwen3-30B-A3B, a decode step": lambda: peers("30b-a3b", *DECODE),
    "Qwen3-30B-A3B, first token": lambda: peers("30b-a3b", *FIRST),
    "Qwen3-30B-A3B, prefill": lambda: peers("30b-a3b", "prefill 64x2048"),
    "Qwen3-0.6B over HTTP at": lambda: http(lambda load: float(load["ttft_s"]["p50"]) * 1e3),
    "the same, gaps between tokens": lambda: http(lambda load: float(load["gap_s"]["p99"]) * 1e3),
    "the same servers, from start to ready": ready,
    "a layer of 128 experts": lambda: moe(1, 32, 256, 4096),
}


def table() -> list[list[str]]:
    """Returns the cells of the table's rows."""
    lines = README.partition("| | Segue | vLLM |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def is_rounding(printed: str, value: float) -> bool:
    """Whether the printed number is the value, rounded to the printed digits."""
    digits = printed.replace(",", "")
    if "." in digits:
        place = 10.0 ** -len(digits.partition(".")[2])
    else:
        place = 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(float(digits) - value) <= place / 2 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("printed", "value", "right"),
    [("0.85", 0.852, True), ("0.85", 0.856, False), ("26,700", 26749, True), ("26,700", 26760, False)],
)
def test_is_rounding_accepts_only_the_rounded_value(printed: str, value: float, right: bool) -> None:
    assert is_rounding(printed, value) == right


@pytest.mark.parametrize(("row", "begins"), list(zip(table(), ROWS, strict=True)), ids=list(ROWS))
def test_a_row_has_the_stored_figures(row: list[str], begins: str) -> None:
    words, *cells = row
    assert words.startswith(begins)
    for cell, values in zip(cells, ROWS[begins](), strict=True):
        for printed, value in zip(cell.split(" / "), values, strict=True):
            assert is_rounding(printed, value), (words, printed, value)


def test_readme_states_in_how_many_figures_segue_is_ahead() -> None:
    models = "0.6b", "4b", "8b", "llama-8b", "30b-a3b"
    sittings = [stored(f"gpu_peers_{model}")["figures"] for model in models]
    faster = [each["faster"] for figures in sittings for each in figures.values()]
    behind = [value for value in faster if value <= 1]
    assert (len(faster), len(faster) - len(behind)) == (50, 47)
    assert "Of the 50 figures of these sittings, Segue is ahead in 47." in " ".join(README.split())
    assert all(0.994 <= value <= 0.998 for value in behind)


def test_readme_states_how_many_prompts_make_test_compares() -> None:
    setups = [(len(each.values[0].cases), bool(each.marks)) for each in test_correctness.shortened()]
    assert [prompts for prompts, is_slow in setups if not is_slow] == [9, 18]
    assert [prompts for prompts, is_slow in setups if is_slow] == [30] * 7
    text = " ".join(README.split())
    assert "every token of 18 prompts" in text and "and 9 of them" in text
    assert "30 prompts in seven setups" in text
