from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from segue.config import EngineConfig
from segue.failover import canary
from segue.failover.canary import CanaryNote
from segue.server.canary import facts_of

NOTE = CanaryNote([5, 9], [-0.25, -1.5])


@pytest.mark.parametrize(
    ("found", "exact", "near"),
    [
        (NOTE, True, True),
        (CanaryNote([5, 9], [-0.25, math.nextafter(-1.5, 0)]), False, True),
        (CanaryNote([5, 8], [-0.25, -1.46]), False, True),  # another token that is about as likely
        (CanaryNote([5, 8], [-0.25, -1.4]), False, False),
        (CanaryNote([6, 1], [-0.26, -9.0]), False, True),  # nothing behind another token can be compared
        (CanaryNote([6, 9], [-0.75, -1.5]), False, False),
        (CanaryNote([5], [-0.25]), False, False),
    ],
)
def test_what_counts_as_equal(found: CanaryNote, exact: bool, near: bool) -> None:
    assert (canary.difference(NOTE, found, is_exact=True) == "") == exact
    assert (canary.difference(NOTE, found, is_exact=False) == "") == near


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = canary.path_of(tmp_path, "default", ["a", 1])
    assert canary.read(path) is None
    canary.write(path, NOTE)
    assert canary.read(path) == NOTE
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"tokens": [1')
    assert canary.read(path) is None, "half a note is none"


def test_engines_with_other_weights_have_another_note(tmp_path: Path) -> None:
    paths = [
        canary.path_of(tmp_path, cohort, facts)
        for cohort, facts in (("a", ["v1"]), ("a", ["v2"]), ("b", ["v1"]), ("a", ["v1", 1]))
    ]
    assert len(set(paths)) == 4
    assert canary.path_of(tmp_path, "a", ["v1"]) == paths[0]


def test_engines_that_compute_otherwise_have_another_note(tmp_path: Path) -> None:
    def facts(**options: Any) -> str:
        ready = SimpleNamespace(device="cpu", dtype="bfloat16", attention_backend="cpu")
        weights = SimpleNamespace(version="0", generation=1)
        runtime: Any = SimpleNamespace(
            config=EngineConfig(**options),
            manager=SimpleNamespace(ready=ready, weights=weights, role="both"),
            source=SimpleNamespace(directory=tmp_path, gguf=None, format="safetensors", config="llama"),
        )
        return repr(facts_of(runtime))

    others = [{}, {"tp": 2}, {"deterministic": True}, {"kv_cache_dtype": "fp8"}]
    assert len({facts(**options) for options in others}) == len(others)
    assert facts(kv_cache_dtype="fp8_e4m3") == facts(kv_cache_dtype="fp8")


def test_the_prompt_fits_any_vocabulary() -> None:
    assert all(0 <= token < 3 for token in canary.prompt(3))
    assert len(set(canary.prompt(150_000))) == canary.NUM_PROMPT_TOKENS
