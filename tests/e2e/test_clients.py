"""Call orders of slime, AReaL and the seed's trainer, by a process that has torch and knows no Segue."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.served import STORY, Client, greedy, serve
from tests.frontend.tiny_model import CONFIG, write_model

TRAINER = Path(__file__).with_name("torch_trainer.py")
OPTIONS = ("--dtype", "float32", "--num-kv-tokens", "4096", "--max-running-requests", "4")
PROMPTS = [STORY, "The capital of France is", "0 1 2 3"]


@dataclass(frozen=True)
class Checkpoint:
    """Random weights on disk: for an engine, and for a trainer."""

    directory: Path
    tensors: Path


def make_checkpoint(directory: Path, seed: int) -> Checkpoint:
    write_model(directory)
    torch.manual_seed(seed)
    vocab_size = transformers.AutoConfig.from_pretrained(directory).vocab_size
    config = transformers.LlamaConfig(**CONFIG, vocab_size=vocab_size, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    torch.save({name: parameter.detach() for name, parameter in model.named_parameters()}, directory / "sent")
    return Checkpoint(directory, directory / "sent")


def answers(client: Client) -> list[Any]:
    """Greedy tokens and their logprobs."""
    replies = client.generate(PROMPTS, greedy(16), return_logprob=True)
    return [reply["meta_info"]["output_token_logprobs"] for reply in replies]


@dataclass
class Engine:
    """A server, the checkpoint that it does not have now, and what either answers."""

    client: Client
    absent: list[Checkpoint]
    expected: dict[Path, list[Any]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    checkpoints = [make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed) for seed in (1, 2)]
    expected: dict[Path, list[Any]] = {}
    for checkpoint in reversed(checkpoints):
        with serve("--model", str(checkpoint.directory), *OPTIONS) as served:
            client = Client(served)
            try:
                expected[checkpoint.directory] = answers(client)
                if checkpoint is checkpoints[0]:
                    yield Engine(client, [checkpoints[1], checkpoints[0]], expected)
            finally:
                client.close()


class Trainer:
    """The process, spoken to line by line."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, str(TRAINER)], stdin=pipe, stdout=pipe, text=True)

    def tell(self, line: str, answer: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{answer}\n"


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    with trainer.process:
        yield trainer
        trainer.process.kill()


@pytest.mark.parametrize("name", ["slime", "areal", "seed"])
def test_a_client_of_old_ends_with_its_weights(trainer: Trainer, engine: Engine, name: str) -> None:
    client, new, old = engine.client, *engine.absent
    assert engine.expected[new.directory] != engine.expected[old.directory]
    assert answers(client) == engine.expected[old.directory]
    trainer.tell(json.dumps([name, client.served.url, str(new.tensors)]), "met")
    running = client.begin(STORY, greedy(400), "running")
    trainer.tell("go", "done")
    engine.absent.reverse()
    meta = running.result(30)["meta_info"]
    # The old calls end what runs; with the seed's it goes on with the new weights.
    assert meta["finish_reason"]["type"] == ("length" if name == "seed" else "abort")
    assert len(meta["weight_versions"]) == (2 if name == "seed" else 1)
    assert answers(client) == engine.expected[new.directory]
    assert not client.state()["engine_paused"]
