"""The workload is pinned, because its figures are compared over years and between engines."""

import hashlib
import json

import pytest

from bench import suite

CALLS = "f4e7aa83b621784aade9e36b94b3df3245234c619b65755537c7ad1b0daa0a01"


def test_the_calls_of_the_workload_have_not_changed(capsys):
    digest, calls = hashlib.sha256(), []

    def generate(prompts: list[list[int]], tokens: list[int], temperature: float) -> list[int]:
        digest.update(json.dumps([prompts, tokens, temperature]).encode())
        calls.append(len(prompts))
        return tokens

    suite.run("engine", "0.6b", generate)
    assert len(calls) == 101
    assert digest.hexdigest() == CALLS
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + 3 + 5 + 1 and all(line.startswith("RESULT engine 0.6b ") for line in lines)


def test_an_engine_that_makes_a_wrong_number_of_tokens_is_an_error():
    with pytest.raises(RuntimeError, match="where"):
        suite.run("engine", "0.6b", lambda prompts, tokens, temperature: tokens[1:])


@pytest.mark.parametrize("size", suite.SHAPES)
def test_the_engine_can_read_a_model_directory(size, tmp_path):
    from segue.checkpoint.source import resolve

    config, shape = resolve(suite.model_dir(size), "dummy", tmp_path).config, suite.SHAPES[size]
    assert (config.num_layers, config.hidden_size) == (shape["num_hidden_layers"], shape["hidden_size"])
    assert config.vocab_size == (128256 if size == "llama-8b" else 151936)
    assert (config.moe is not None) == (size == "30b-a3b")
