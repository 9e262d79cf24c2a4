"""The committed reference is still what transformers generates with the bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.checkpoint import bundled
from segue.config import EngineConfig
from tests.fixtures import reference
from tests.fixtures.prompts import PROMPTS
from tests.fixtures.reference import NUM_TOKENS, NUM_TOP, Case, differences

TOLERANCE = 5e-5  # of logprobs between two runs, since other numbers of threads round differently


def test_the_reference_was_made_from_the_bundled_model() -> None:
    assert reference.load().made_by["model_sha256"] == bundled.SHA256


def test_the_reference_covers_every_prompt_completely() -> None:
    cases = reference.load().cases
    assert [case.name for case in cases] == [prompt.name for prompt in PROMPTS]
    for case in cases:
        lengths = {len(case.output_ids), len(case.logprobs), len(case.margins), len(case.top_ids)}
        assert lengths == {NUM_TOKENS}
        assert {len(top) for top in case.top_logprobs} == {NUM_TOP}


def test_a_changed_token_and_a_changed_logprob_are_differences() -> None:
    case = reference.load().cases[0]
    tokens = _with(case, output_ids=[*case.output_ids[:5], 7, *case.output_ids[6:]])
    logprobs = _with(case, logprobs=[case.logprobs[0] + 1e-3, *case.logprobs[1:]])
    assert len(differences([tokens], [case], tolerance=TOLERANCE)) == 1
    assert len(differences([logprobs], [case], tolerance=TOLERANCE)) == 1
    assert differences([case], [case], tolerance=TOLERANCE) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("default")
def test_a_new_reference_equals_the_committed_one() -> None:
    from tests.fixtures.make_reference import build

    again = build(bundled.ensure_bundled_model(Path(EngineConfig.create().cache_dir)))
    assert differences(again.cases, reference.load().cases, tolerance=TOLERANCE) == []


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
