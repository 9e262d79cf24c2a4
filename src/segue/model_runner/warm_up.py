"""The steps that an engine takes on CUDA before it is ready, to compile all kernels that a request can need.

A kernel has variants by the model and the options, which do not change, and by sizes of the step: the number
of its tokens, decode rows and sampled rows chooses tiles and splits. Each choice changes at some numbers of
rows (`row_steps`). One number of each interval between two of them stands for all: the list has the last one.
Kernels take lengths and counts that a request decides without a variant of their own (`do_not_specialize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from segue.attention.base import PagedBackend
from segue.kernels import fp8_plan
from segue.kernels.fp8_plan import FP8Shape
from segue.layers.blocks import Linear
from segue.messages.control import EngineLimits
from segue.messages.guided import GrammarSpec
from segue.messages.requests import SamplingMode, SamplingParams, pack_ids
from segue.messages.steps import NewSlot, StepPlan
from segue.models.decoder import Decoder
from segue.sizes import ceil_div

# One request per mode of sampling, which uses all that the mode allows.
SAMPLING: dict[SamplingMode, SamplingParams] = {
    "plain": SamplingParams(max_new_tokens=1, logprobs=0),
    "filtered": SamplingParams(max_new_tokens=1, logprobs=0, top_k=2, top_p=0.9, min_p=0.01),
    "guided": SamplingParams(
        max_new_tokens=1, logprobs=0, top_k=2, top_p=0.9, min_p=0.01, grammar=GrammarSpec("regex", "a")
    ),
    "full": SamplingParams(
        max_new_tokens=1,
        min_new_tokens=1,
        top_k=2,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        stop_token_ids=(0,),
        logprobs=2,
        allowed_token_ids=pack_ids([0, 1]),
        bad_words=((0,), (0, 1)),
    ),
}
_PROMPT = SamplingParams(max_new_tokens=1)
_SCORED_PROMPT = SamplingParams(max_new_tokens=1, prompt_logprobs_start=0, num_prompt_top=2)
NOT_FEW = 16  # tokens: kernels of steps with as many are not those for few tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpStep:
    """A step of so many decode rows, then prompts of so many tokens each."""

    decode: int = 0
    prompts: tuple[int, ...] = ()
    mode: SamplingMode = "plain"
    scores: bool = False  # whether log-probabilities of the prompts are asked for

    def plan(self, step: int) -> StepPlan:
        """Return the plan of the step, which uses the first slots, without pages: of the scratch page."""
        params = SAMPLING[self.mode] if self.decode else _SCORED_PROMPT if self.scores else _PROMPT
        lens = [1] * self.decode + list(self.prompts)
        slots = list(range(len(lens)))
        return StepPlan(
            step,
            new_slots=[
                NewSlot(slot, pack_ids([0] * length), length, params)
                for slot, length in zip(slots, lens, strict=True)
            ],
            num_decode=self.decode,
            slots=slots,
            starts=[0] * len(lens),
            lens=lens,
            num_logits=lens if self.scores else [1] * len(lens),
            samples=[True] * len(lens),
            sampling_mode="full" if self.scores else self.mode,
        )


def representatives(steps: Iterable[int], most: int) -> list[int]:
    """Return the last number of each interval that ends at one of `steps`.

    They are ascending, from 1 to `most`, which are among them.
    """
    return sorted(number for number in {1, most, *steps} if 1 <= number <= most)


def all_steps(steps: Iterable[int], limits: EngineLimits) -> Iterator[WarmUpStep]:
    """Yield the steps to take, for choices that change at `steps` numbers of rows."""
    rows, chunk, longest = limits.max_running_requests, limits.chunked_prefill_size, limits.max_seq_len - 1
    steps, max_tokens = set(steps), min(chunk + rows, rows * longest)
    for tokens in representatives(steps, max_tokens):
        yield WarmUpStep(prompts=_split(tokens, ceil_div(tokens, longest)))
    for decode in representatives(steps, rows):
        yield WarmUpStep(decode=decode)
        if decode < rows:
            for prompt in sorted({1, min(NOT_FEW, chunk, longest)}):
                yield WarmUpStep(decode=decode, prompts=(prompt,))
    for decode in representatives(steps, min(rows, NOT_FEW)):
        yield from (WarmUpStep(decode=decode, mode=mode) for mode in SAMPLING)
    for scored in representatives(steps, min(chunk, rows * longest) - 1):
        if scored == 1 or scored > rows:  # logits of fewer rows are those of decode
            yield WarmUpStep(prompts=_split(scored + 1, ceil_div(scored + 1, longest)), scores=True)


def row_steps(model: Decoder, backend: PagedBackend, limits: EngineLimits) -> set[int]:
    """Return the numbers of rows up to which the kernels of a step are the same, of all its parts."""
    from segue.kernels.gemm_plan import FEW_ROWS
    from segue.kernels.moe_plan import MoEShape
    from segue.kernels.triton import gate_up_silu, gemm, moe
    from segue.kernels.triton.launch import device_facts

    max_rows = limits.chunked_prefill_size + limits.max_running_requests
    # One row has kernels of its own.
    found = {1, FEW_ROWS, *gate_up_silu.ROW_STEPS, *gemm.row_steps(), *backend.row_steps(max_rows)}
    if (fused := model.collectives.fused_all_reduce) is not None:
        found.add(fused.max_rows)
    config = model.config
    if config.quantization is not None:
        found |= fp8_plan.row_steps(_fp8_shapes(model), max_rows, device_facts().num_sms)
    if config.moe is not None:
        own, size = config.moe, model.shard.expert_intermediate_size
        block = None if config.fp8 is None else config.fp8.block
        found |= moe.token_steps(
            MoEShape(own.num_experts, own.num_experts_per_tok, size, config.hidden_size, block)
        )
    if model.deterministic:
        weights: set[Tensor] = {*model.parameters()}
        for size in {len(weight) for weight in weights if weight.dim() == 2}:
            found |= gemm.batch_invariant_rows(size, max_rows, device_facts())
    return found


def _fp8_shapes(model: Decoder) -> Iterator[FP8Shape]:
    """Yield the GEMMs by weights in FP8 for which kernels of ours multiply many tokens."""
    from segue.kernels.triton.fp8_tokens import can_multiply_in_fp8

    for module in model.modules():
        if isinstance(module, Linear) and module.scale is not None:
            (size, depth), block = module.weight.shape, module.block
            in_fp8 = can_multiply_in_fp8(size, depth, block, module.dtype)
            if block or not in_fp8:
                yield FP8Shape(1, size, depth, block, "whole")
            if not in_fp8:
                yield FP8Shape(1, size, depth, block, "split")


def _split(tokens: int, count: int) -> tuple[int, ...]:
    """Split so many tokens into `count` prompts, which differ by one token at most."""
    return tuple(tokens // count + (index < tokens % count) for index in range(count))


def captured_sizes(sizes: Sequence[int], steps: Iterable[int]) -> list[int]:
    """Return of `sizes` those that launch different kernels: the first one of each interval of `steps`."""
    bounds = sorted(steps)
    found: dict[int, int] = {}
    for size in sorted(sizes):
        found.setdefault(sum(bound < size for bound in bounds), size)
    return list(found.values())
