"""What the examples of reinforcement learning train: a small model on sums, by its policy gradient.

Advantages are relative to the other samples of a question (GRPO, arXiv:2402.03300); the ratio of a token's
probability in the trainer to its probability in the engine is clipped (PPO, arXiv:1707.06347).
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.trainer.model import load_model

CLIP = 0.2
MICRO_BATCH = 8  # samples per forward and backward pass, which bounds the memory of activations


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The options of every loop on sums."""

    seed: int = 0
    num_steps: int = 16
    num_prompts: int = 4  # per step
    group_size: int = 8  # samples per prompt
    max_tokens: int = 24
    learning_rate: float = 2e-5
    model: str = ""  # a directory or a hub id; "": the bundled model
    kill_engine_at: int = -1  # the step in which the engine that serves is killed; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    answer: int


@dataclass(slots=True, kw_only=True)
class Sample:
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]  # of the output tokens, as the engine returned them
    text: str
    versions: list[str]  # of the weights that made the tokens, in their order
    has_ended: bool  # whether the answer ended by itself, within `max_tokens`
    is_right: bool  # whether the last number in the text is the sum
    advantage: float = 0.0

    @property
    def reward(self) -> float:
        return (self.has_ended + self.is_right) / 2


# Sends /generate a request for each prompt (token ids) with its sampling parameters; returns the replies.
Generate = Callable[[list[list[int]], list[dict[str, Any]]], list[dict[str, Any]]]


def ask(numbers: random.Random) -> Question:
    a, b = numbers.randint(1, 9), numbers.randint(1, 9)
    return Question(
        prompt=f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n", answer=a + b
    )


class Policy:
    """The model in training: float32 weights, bfloat16 arithmetic, AdamW."""

    def __init__(self, device: str, settings: LoopSettings) -> None:
        cache = EngineConfig.create().cache_dir
        source = resolve(settings.model or None, "auto", cache)  # the same files as the engine
        self.model = load_model(source, torch.float32).to(device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(source.tokenizer_directory)
        rate = settings.learning_rate
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)

    def improve(self, samples: list[Sample]) -> tuple[float, float]:
        """Take one step; return the logprob gap of engine and trainer, and the share of clipped ratios."""
        num_tokens = sum(len(sample.output_ids) for sample in samples)
        gap = clipped = 0.0
        for first in range(0, len(samples), MICRO_BATCH):
            part = samples[first : first + MICRO_BATCH]
            ours, theirs, mask = self._logprobs(part)
            advantages = torch.tensor([[sample.advantage] for sample in part], device=ours.device)
            ratio = (ours - theirs).exp()
            bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantages, bounded * advantages)
            torch.autograd.backward(-(gain * mask).sum() / num_tokens)
            gap += ((ours - theirs).abs() * mask).sum().item() / num_tokens
            clipped += ((ratio != bounded) * mask).sum().item() / num_tokens
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return gap, clipped

    def _logprobs(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trainer's logprobs, the engine's, and the token mask, all ``[samples, longest output]``.

        Sequences are padded at their ends, which causal attention ignores.
        """
        pad = torch.nn.utils.rnn.pad_sequence
        device = self.model.device
        tokens = pad([torch.tensor(s.prompt_ids + s.output_ids) for s in samples], batch_first=True).to(
            device
        )
        theirs = pad([torch.tensor(s.logprobs) for s in samples], batch_first=True).to(device)
        mask = pad([torch.ones(len(s.output_ids)) for s in samples], batch_first=True).to(device)
        rows = torch.arange(len(samples), device=device)[:, None]
        starts = torch.tensor([[len(s.prompt_ids)] for s in samples], device=device)
        positions = (starts + torch.arange(theirs.shape[1], device=device)).clamp(max=tokens.shape[1] - 1)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=tokens).last_hidden_state[rows, positions - 1]
            logits = self.model.lm_head(hidden)
        chosen = tokens[rows, positions]
        ours = -torch.nn.functional.cross_entropy(logits.float().mT, chosen, reduction="none")
        return ours, theirs, mask


def roll_out(
    generate: Generate, policy: Policy, settings: LoopSettings, numbers: random.Random
) -> list[Sample]:
    """Draw some questions, sample a group of answers to each, and set the advantages within each group."""
    questions = [ask(numbers) for _ in range(settings.num_prompts)]
    repeated = [question for question in questions for _ in range(settings.group_size)]
    prompts = [policy.tokenizer(question.prompt)["input_ids"] for question in repeated]
    sampling = {"temperature": 1.0, "max_new_tokens": settings.max_tokens}
    replies = generate(prompts, [{**sampling, "seed": numbers.getrandbits(31)} for _ in prompts])
    samples = [sample_of(*each) for each in zip(repeated, prompts, replies, strict=True)]
    for first in range(0, len(samples), settings.group_size):
        group = samples[first : first + settings.group_size]
        rewards = [sample.reward for sample in group]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        for sample in group:
            sample.advantage = (sample.reward - mean) / (deviation + 0.01)
    return samples


def sample_of(question: Question, prompt_ids: list[int], reply: dict[str, Any]) -> Sample:
    meta = reply["meta_info"]
    found = re.findall(r"\d+", reply["text"])
    return Sample(
        prompt_ids=prompt_ids,
        output_ids=reply["output_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        text=reply["text"],
        has_ended=meta["finish_reason"]["type"] == "stop",
        is_right=bool(found) and int(found[-1]) == question.answer,
        versions=[each["version"] for each in meta["weight_versions"]],
    )
