"""Checks that an engine's tokens are the model's: scores each again, teacher-forced, by one eager forward.

Sampling is the argmax of logits and noise, and the noise is a function of (seed, position, token). So the
eager logits give the token that should have been drawn. A token's *regret* is the difference between the best
score and its own, noise included. If logits differ only by rounding, regrets are 0 except for close calls; a
token from wrong logits has a regret of several units. The effect of rounding depends on the model: it is
measured as the difference between the eager logits and those of a float32 forward of the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.attention import registry as attention
from segue.attention.base import AttentionShape, Context
from segue.checkpoint.kv_scales import read_kv_scales
from segue.checkpoint.load import load_weights
from segue.checkpoint.source import resolve_model
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.kernels.fp8 import FP8, ExpertWeights
from segue.kvcache.page_table import PageTable
from segue.layers.blocks import Linear
from segue.layers.moe_backend import MoEBackend
from segue.memory.rank_memory import PrivateMemory
from segue.model_runner.profile_run import make_pool
from segue.model_runner.resolved_config import resolve_config
from segue.models.decoder import MoE, build_model
from segue.sampling.gumbel_max import gumbel

MIN_BOUND = 0.1  # of a regret, in logits
MAX_BOUND = 1.0  # more is not rounding: the eager forward, which shares kernels with the engine, is wrong
ROUNDINGS = 8.0  # the bound of a regret, in root mean squares of the change that rounding makes to a logit
_BLOCK = 128  # as in segue.sampling.gumbel_max
_POSITIONS = 128  # output tokens scored at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """A request and the tokens that an engine produced for it."""

    prompt: Sequence[int]
    output: Sequence[int]
    temperature: float  # 0: greedy; otherwise temperature is the only sampling option
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of all tokens of some requests."""

    tokens: int
    equal: float  # share of tokens that the eager forward would also have produced
    worst_regret: float  # in logits
    bound: float  # the largest regret that is allowed, in logits
    wrong: int  # tokens whose regret exceeds the bound

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.equal:.2%} as eager, worst regret {self.worst_regret:.4f} of "
            f"{self.bound:.4f} allowed, {self.wrong} wrong"
        )


class Teacher:
    """Runs the model of `config` on one sequence at a time, without scheduler and graphs."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the weights."""
        self._source = source = resolve_model(config)
        tp = TPInfo()
        self._config, self._resolved = config, resolve_config(config, source, tp)
        device, dtype = self._resolved.device, self._resolved.dtype
        self._model = build_model(source.config, dtype=dtype)
        self._memory = PrivateMemory(device)
        load_weights(
            self._model,
            source.config,
            source,
            tp,
            self._memory,
            dtype,
            progress=False,
            seed=config.seed,
        )
        self._scales = read_kv_scales(source) if self._resolved.fp8_kv else None
        self._model.build_derived()

    def in_float32(self) -> Teacher:
        """Return a teacher of the same weights that computes in float32.

        Weights in FP8 keep their bits, and each GEMM has all of their values. Experts, which may leave no
        room for themselves in float32, are widened layer by layer while they run.
        """
        exact = copy(self)
        exact._resolved = replace(self._resolved, dtype=torch.float32)
        exact._model = build_model(self._source.config, dtype=torch.float32)
        exact._model.load_state_dict(
            {
                name: tensor if tensor.dtype == FP8 or ".experts." in name else tensor.float()
                for name, tensor in self._model.state_dict().items()
            },
            assign=True,
        )
        exact._model.build_derived()
        for module in exact._model.modules():
            if isinstance(module, Linear) and module.scale is not None:
                module.drop_packed()
            if isinstance(module, MoE) and module.block is None:
                module.backend = partial(_run_widened, module.backend)
        return exact

    @torch.inference_mode()
    def regrets(self, request: Produced) -> Tensor:
        """Return the regret of each output token, float64 `[n]`, in logits."""
        tokens = torch.tensor(request.output, device=self._resolved.device)
        positions = torch.arange(len(tokens), device=self._resolved.device) + len(request.prompt)
        parts = [
            regrets(logits, tokens[part], positions[part], request.seed, request.temperature)
            for part, logits in self.logits(request)
        ]
        return torch.cat(parts).cpu()

    @torch.inference_mode()
    def logits(self, request: Produced) -> Iterator[tuple[slice, Tensor]]:
        """Yield float32 logits `[n, V]` for each run of at most _POSITIONS output tokens."""
        hidden = self._hidden([*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :]
        for start in range(0, len(request.output), _POSITIONS):
            part = slice(start, start + _POSITIONS)
            logits = self._model.logits(hidden[part])
            assert logits is not None
            yield part, logits

    def _hidden(self, ids: list[int]) -> Tensor:
        """Return the last hidden states `[n, hidden]` of all `ids`, by one eager prefill step.

        The scheduler's part is done by hand: one request in slot 0 with all pages of a small KV cache.
        """
        resolved, model = self._resolved, self._model
        num_pages = -(-len(ids) // resolved.page_size)
        kv = make_pool(model, resolved, num_pages, self._memory.take_kv, self._scales)
        table = PageTable(
            max_running=1,
            max_seq_len=len(ids),
            page_size=resolved.page_size,
            scratch_page=kv.scratch_page,
            device=resolved.device,
        )
        table.assign(0, 0, range(num_pages))
        shape = AttentionShape(
            num_heads=model.shard.num_heads,
            num_kv_heads=model.shard.num_kv_heads,
            head_dim=model.config.head_dim,
            scale=model.config.head_dim**-0.5,
        )
        setting = attention.Setting(
            shape=shape,
            device=resolved.device,
            dtype=resolved.dtype,
            page_size=resolved.page_size,
            fp8_kv=resolved.fp8_kv,
        )
        selection = attention.select(self._config.attention_backend, setting)
        hidden: Tensor = model(
            Context.build(
                input_ids=torch.tensor(ids, device=resolved.device),
                slots=[0],
                q_lens=[len(ids)],
                kv_lens=[len(ids)],
                num_decode=0,
                page_table=table,
                kv=kv,
                backend=selection.make(shape, kv),
            )
        )
        return hidden


def _run_widened(
    backend: MoEBackend,
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
) -> Tensor:
    """Run a backend with the weights of its experts in float32, which it has for this call alone."""
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    return backend(x, gate_up.float(), down.float(), weights, experts)


def regrets(logits: Tensor, tokens: Tensor, positions: Tensor, seed: int, temperature: float) -> Tensor:
    """Return how far each token's score is below the best score, float64 `[n]`, in logits.

    Args:
        logits: float32 `[n, V]`.
        tokens: int64 `[n]`, the tokens that were produced.
        positions: int64 `[n]`, the positions of those tokens in their sequence.
        seed: the request's seed.
        temperature: with 0, the score is the logit. Otherwise a token is drawn in two stages, by the score of
            its block of 128 tokens and by its own score within the block; the larger regret of both counts.
    """
    if temperature == 0.0:
        return _below(logits.double(), tokens)
    scaled = logits.double() / temperature
    blocks = F.pad(scaled, (0, -scaled.shape[1] % _BLOCK), value=-torch.inf)
    blocks = blocks.view(len(blocks), -1, _BLOCK)
    num_blocks = blocks.shape[1]
    seeds = torch.full_like(positions, seed)[:, None]
    counters = torch.arange(num_blocks + _BLOCK, device=logits.device)
    noise = gumbel(seeds, positions[:, None], counters)
    chosen = tokens // _BLOCK
    between = _below(blocks.logsumexp(-1) + noise[:, :num_blocks], chosen)
    block = blocks[torch.arange(len(tokens), device=logits.device), chosen]
    within = _below(block + noise[:, num_blocks:], tokens % _BLOCK)
    return torch.maximum(between, within) * temperature


def _below(scores: Tensor, index: Tensor) -> Tensor:
    return scores.amax(-1) - scores.gather(-1, index[:, None]).squeeze(-1)


def rounding(teacher: Teacher, exact: Teacher, request: Produced) -> float:
    """Return the root mean square of the difference between the logits of `teacher` and `exact`."""
    total, count = 0.0, 0
    for (_, mine), (_, true) in zip(teacher.logits(request), exact.logits(request), strict=True):
        total += (mine - true).double().square().sum().item()
        count += mine.numel()
    return math.sqrt(total / count)


def allowed(noise: float) -> float:
    """Return the bound of a regret, in logits, if rounding changes a logit by `noise`."""
    return min(max(MIN_BOUND, ROUNDINGS * noise), MAX_BOUND)


def rescore(teacher: Teacher, requests: Iterable[Produced], bound: float) -> Score:
    """Score every token of `requests`; a token with a regret above `bound` logits is wrong."""
    found = torch.cat([teacher.regrets(request) for request in requests])
    return Score(
        tokens=len(found),
        equal=(found == 0).double().mean().item(),
        worst_regret=found.max().item(),
        bound=bound,
        wrong=int((~(found <= bound)).sum()),  # written so that NaN counts as wrong
    )
