"""Length-aware prefill on a real model: it changes the order of work, and not one bit of any reply."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

import segue
from segue.laps.cost import NO_WORK
from segue.laps.pick import LapsPolicy
from segue.model_runner import step_times
from segue.scheduler.scheduler import Scheduler
from segue.worker import main
from tests.model_runner import making, tiny

LAPS: dict[str, Any] = {
    "enable_laps_scheduler": True,
    "laps_length_threshold": 8,
    "laps_max_blocking_ms": 5.0,
    "chunked_prefill_size": 64,
}
PREEMPTED = {"num_kv_tokens": 320, "max_running_requests": 32}


@pytest.fixture(autouse=True)
def every_size_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a busy machine, which takes long for a step of a tiny model."""
    monkeypatch.setattr(step_times, "MOST_S", math.inf)


def prompts() -> list[list[int]]:
    """Short and long prompts in any order; a third of the long ones begin like another one."""
    random, found = Random(7), []
    for index in range(40):
        length = random.randint(1, 8) if index % 3 else random.randint(40, 200)
        start = found[random.randrange(len(found))][:64] if index % 9 == 0 and found else []
        found.append(start + making.prompt(length, seed=index))
    return found


def replies(engine: Any) -> list[Any]:
    found = engine.generate(
        input_ids=prompts(),
        sampling_params=[{"max_new_tokens": 30, "temperature": 0.8, "sampling_seed": i} for i in range(40)],
        return_logprob=True,
    )
    return [(reply["output_ids"], reply["meta_info"]["output_token_logprobs"]) for reply in found]


def test_the_error_of_predictions_is_known_after_the_first_steps(tmp_path: Path) -> None:
    """They are compared with the steps that were timed at start."""
    tiny.save_llama(tmp_path)
    options = making.options(tmp_path, log_level="error") | LAPS
    with segue.Engine(**options, embedded=True) as engine:
        info = engine.get_server_info()
        assert info["decided"]["init_steps"][-1]["name"] == "step times"
        assert info["internal_states"][0]["laps"]["error_p90"] == 0, "the timed steps are no predictions"
        for seed in range(10):
            engine.generate(input_ids=making.prompt(40, seed), sampling_params={"max_new_tokens": 1})
        assert engine.get_server_info()["internal_states"][0]["laps"]["error_p90"] > 0


def test_before_the_first_request_the_scheduler_predicts_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save_llama(tmp_path)
    made: list[Scheduler] = []

    def make(*args: Any, **options: Any) -> Scheduler:
        made.append(Scheduler(*args, **options))
        return made[0]

    monkeypatch.setattr(main, "Scheduler", make)
    with segue.Engine(**making.options(tmp_path, log_level="error") | LAPS, embedded=True):
        assert made[0].cost.largest == 64 and made[0].cost.seconds(NO_WORK.plus(64, 0)) > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_replies_are_those_without_laps_bit_for_bit(
    tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By tokens: on a busy machine all prompts of a model as small as this one may take the same time.
    monkeypatch.setattr(
        LapsPolicy, "classify", lambda self, tokens, history: "short" if tokens <= 8 else "long"
    )
    tiny.save_llama(tmp_path)
    options = making.options(
        tmp_path, **PREEMPTED, deterministic=True, disable_overlap=not overlap, log_level="error"
    )
    with segue.Engine(**options, embedded=True) as engine:
        expected = replies(engine)
        assert engine.get_server_info()["internal_states"][0]["laps"] is None
    with segue.Engine(**options | LAPS, embedded=True) as engine:
        assert replies(engine) == expected
        state = engine.get_server_info()["internal_states"][0]
        laps = state["laps"]
        assert laps["picks"]["short"] > 0 and laps["chunks"] > 0 and laps["chunk_tokens"] > 0
        assert laps["waiting"] == {"short": 0, "long": 0}
        assert state["num_preemptions"] > 0
