"""Bars hold only for correct tokens and complete runs, and Segue has to be ahead in every figure."""

import json
import sys

import pytest

from bench import peers, report, suite

NAMES = [*peers.RATIOS["0.6b"], *peers.MAX_MS["0.6b"]]


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """Returns the exit code for a run that is twice as fast, with the given changes."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)

    def run(scores, *, names=NAMES, beside="", size="0.6b", changed=()):
        ours = {name: 200.0 if name in peers.PER_SECOND else 1.0 for name in names} | dict(changed)
        found = {"circumstances": {}, "figures": ours, "of the floor": dict.fromkeys(ours, 0.5)}
        (tmp_path / f"gpu_offline_{size}.json").write_text(json.dumps(found | scores))
        lines = [f"RESULT vllm {size} {name} " for name in NAMES]
        values = ["tok_per_s=100" if name in peers.PER_SECOND else "step_ms=2" for name in NAMES]
        log = tmp_path / "theirs.log"
        log.write_text("\n".join(map(str.__add__, lines, values)) + beside)
        monkeypatch.setattr(sys, "argv", ["peers", size, str(log)])
        return peers.main()

    return run


RIGHT = {"scored again": {"256 x 1022 + 1024": {"wrong": 0}}}


def test_bars_hold_if_segue_is_twice_as_fast_with_right_tokens(verdict):
    assert verdict(RIGHT) == 0


@pytest.mark.parametrize("scores", [{}, {"scored again": {}}, {"scored again": {"kind": {"wrong": 1}}}])
def test_the_speed_of_wrong_or_unscored_tokens_does_not_count(verdict, scores, capsys):
    assert verdict(scores) == 1
    assert "does not count" in capsys.readouterr().out


def test_a_missing_figure_is_an_error(verdict, capsys):
    with pytest.raises(SystemExit):
        verdict(RIGHT, names=NAMES[1:])
    assert NAMES[0] in capsys.readouterr().err


def test_figures_of_another_size_in_the_same_log_are_ignored(verdict):
    slower = "".join(f"\nRESULT vllm 8b decode bs={rows} step_ms=0.1" for rows in (1, 32, 256) for _ in "abc")
    assert verdict(RIGHT, beside=slower) == 0


@pytest.mark.parametrize("size", suite.SHAPES)
def test_segue_has_to_be_ahead_in_every_figure(verdict, size):
    assert verdict(RIGHT, size=size) == 0
    for name in NAMES:
        assert verdict(RIGHT, size=size, changed={name: 100.0 if name in peers.PER_SECOND else 2.0}) == 1


def test_the_circumstances_of_both_engines_are_stored(verdict, tmp_path):
    verdict(RIGHT, beside='\nCIRCUMSTANCES {"vllm": "0.33.0"}')
    assert json.loads((tmp_path / "gpu_peers_0.6b.json").read_text())["theirs"] == {"vllm": "0.33.0"}
