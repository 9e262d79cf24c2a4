"""One eager step on the device: the forward pass up to the logits, then sampling."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from segue.distributed.collectives import Collectives
from segue.messages.steps import EagerReason, StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.inputs import InputBuilder, PromptRun, StepInputs
from segue.model_runner.sampler import Sampled, Sampler
from segue.model_runner.step_result import DeviceStepResult
from segue.models.decoder import Decoder
from segue.sampling.logprobs import Logprobs, logprobs_of

_LOGITS_BYTES = 16 << 20  # float32 logits of prompt tokens held at a time


class StepExecutor:
    """Runs step plans one after the other, on the calling thread and its current stream."""

    def __init__(
        self,
        *,
        model: Decoder,
        state: BatchState,
        inputs: InputBuilder,
        sampler: Sampler,
        collectives: Collectives,
    ) -> None:
        self._model = model
        self._state = state
        self._inputs = inputs
        self._sampler = sampler
        self._collectives = collectives

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> DeviceStepResult:
        """Apply the plan, run the model, sample, and write the tokens where the next step reads them."""
        started = time.monotonic()
        self._state.apply(plan)
        self._state.writer.flush()
        inputs = self._inputs.build(plan)
        hidden = self._model(inputs.context)
        sampled = self._sample(hidden, inputs, plan)
        prompt_parts = {
            run.slot: prompt_logprobs(self._model, self._state, hidden, run, _LOGITS_BYTES)
            for run in inputs.prompt_runs
        }
        return step_outputs(plan.step, started, sampled, prompt_parts, self._state.device)

    def _sample(self, hidden: Tensor, inputs: StepInputs, plan: StepPlan) -> Sampled:
        count = len(inputs.slots)
        if count == 0:
            return Sampled(tokens=torch.empty(0, dtype=torch.int64, device=hidden.device))
        if len(hidden) != count:  # the model has returned the hidden states of all tokens
            hidden = hidden[inputs.sampling]
        logits = self._model.logits(hidden)
        if logits is not None:
            sampled = self._sampler.sample(logits, inputs.slots, inputs.positions, plan.sampling_mode)
        else:
            sampled = Sampled(tokens=torch.empty(count, dtype=torch.int64, device=hidden.device))
        tokens = self._collectives.broadcast(sampled.tokens)
        self._state.write_tokens(inputs.slots, inputs.positions, tokens)
        return sampled


def prompt_logprobs(
    model: Decoder, state: BatchState, hidden: Tensor, run: PromptRun, max_bytes: int
) -> list[Logprobs]:
    """Return the log-probabilities of a run of prompt tokens, in parts.

    A part has at most `max_bytes` bytes of logits. Only rank 0 gets parts; on other ranks the list is empty.
    """
    # All logits of a chunk at once would be hundreds of MB.
    size = max(1, max_bytes // (4 * model.config.vocab_size))
    known = state.token_pool.data[run.slot, run.position : run.position + run.count].to(torch.int64)
    num_top = max(0, int(state.host.num_top[run.slot]))
    parts = []
    for start in range(0, run.count, size):
        end = min(start + size, run.count)
        logits = model.logits(hidden[run.hidden_start + start : run.hidden_start + end])
        if logits is not None:
            parts.append(logprobs_of(logits, known[start:end], [num_top] * (end - start)))
    return parts


def step_outputs(
    step: int,
    started: float,
    sampled: Sampled,
    prompt_logprobs: dict[int, list[Logprobs]],
    device: torch.device,
    *,
    eager: EagerReason | None = "disabled",
    padded_tokens: int = 0,
) -> DeviceStepResult:
    """Return the results of a step on `device`, and start their copies to the host."""
    on_cpu = device.type == "cpu"
    outputs = DeviceStepResult(
        step=step,
        started=started,
        next_tokens_host=sampled.tokens.to("cpu", non_blocking=True),
        logprobs=sampled.logprobs.to_host() if sampled.logprobs else None,
        logprob_indices=sampled.logprob_indices,
        prompt_logprobs={slot: [part.to_host() for part in parts] for slot, parts in prompt_logprobs.items()},
        copy_done=None if on_cpu else torch.Event(device),
        finished=time.monotonic() if on_cpu else 0.0,
        eager=eager,
        padded_tokens=padded_tokens,
    )
    if outputs.copy_done is not None:
        outputs.copy_done.record()
    return outputs
