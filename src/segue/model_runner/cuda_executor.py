"""One step on a CUDA device: captured graphs where there is one for it, the same functions where not."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from segue.attention.triton import TritonAttention
from segue.kernels.cuda.sampling import sample_plain
from segue.kvcache.pool import KVPool
from segue.model_runner.batch_state import BatchState
from segue.model_runner.device_inputs import RING, DeviceInputs, StepShape
from segue.model_runner.executor import prompt_logprobs, step_outputs
from segue.model_runner.graphs import MOST_TRUNK_TOKENS, Graphs, quiet_gc, row_sizes, token_sizes
from segue.model_runner.inputs import prompt_runs
from segue.model_runner.logprobs import Logprobs
from segue.model_runner.output import StepOutputs
from segue.model_runner.sampler import Sampled, Sampler
from segue.models.decoder import Decoder
from segue.protocol.messages import StepPlan

_LOGITS_BYTES = 64 << 20  # float32 logits of a prompt held at a time
# A captured trunk has room for so many prompts, and for one more with so many tokens.
_PROMPTS, _PER_PROMPT = 8, 16


class CUDAExecutor:
    """Runs step plans on the current stream of a single rank."""

    def __init__(
        self,
        *,
        model: Decoder,
        state: BatchState,
        kv: KVPool,
        backend: TritonAttention,
        sampler: Sampler,
        max_rows: int,
        chunk: int,
    ) -> None:
        self._model = model
        self._state = state
        self._sampler = sampler
        self._inputs = DeviceInputs(state, kv, backend, max_tokens=chunk + max_rows, max_rows=max_rows)
        hidden = model.config.hidden_size
        weight = model.embed.weight
        self._picked = torch.zeros((max_rows, hidden), dtype=weight.dtype, device=weight.device)
        self._ring = torch.zeros((RING, max_rows), dtype=torch.int32).pin_memory()
        self._logprob_ring = torch.zeros((RING, max_rows)).pin_memory()
        self._max_rows, self._max_tokens = max_rows, chunk + max_rows
        pool = torch.cuda.graph_pool_handle()
        self._decode, self._trunk, self._tail = Graphs(pool), Graphs(pool), Graphs(pool)
        self.counts: Counter[str] = Counter()  # graph hits, eager steps by reason, padded tokens

    @property
    def num_graphs(self) -> int:
        """Graphs captured."""
        return len(self._decode) + len(self._trunk) + len(self._tail)

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile what steps above the largest trunk need, then capture all graphs.

        No request is there yet, and the static inputs are zeros: what is computed goes to the scratch page.
        """
        for tokens in {min(2 * MOST_TRUNK_TOKENS, self._max_tokens), self._max_tokens}:
            self._run_trunk(self._shape(tokens))
        quiet_gc()
        self._trunk.capture(token_sizes(self._max_tokens), lambda size: self._run_trunk(self._shape(size)))
        self._tail.capture(row_sizes(self._max_rows), self._run_tail)
        self._decode.capture(row_sizes(self._max_rows), self._run_decode)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutputs:
        """Apply the deltas, run the model, sample, and write the tokens where the next step reads them.

        At most `RING - 1` steps may be unread: their inputs and tokens lie in rings of the host's memory.
        """
        started = time.monotonic()
        self._state.apply(plan)
        slot = plan.step % RING
        only_decode = plan.num_decode == len(plan.rows)
        size = self._decode.bucket(len(plan.rows)) if only_decode and plan.tail == "plain" else None
        if size is not None:
            self._inputs.load_decode(plan, size, slot)
            self._state.writer.flush()
            self._decode.replay(size)
            self._hit(size - len(plan.rows))
            return step_outputs(plan.step, started, self._from_ring(plan, slot), {}, self._state.device)
        count = sum(plan.samples)
        runs = prompt_runs(plan)
        hidden = self._run_any_trunk(plan, slot, wants_hidden=bool(runs))
        if plan.tail == "plain":
            if count:
                bucket = self._tail.bucket(count)
                if bucket is None:
                    self._run_tail(count)
                else:
                    self._tail.replay(bucket)
            return step_outputs(plan.step, started, self._from_ring(plan, slot), {}, self._state.device)
        sampled = self._sample_full(plan, count)
        owed = {
            run.row: prompt_logprobs(self._model, self._state, hidden, run, _LOGITS_BYTES) for run in runs
        }
        return step_outputs(plan.step, started, sampled, owed, self._state.device)

    def _run_any_trunk(self, plan: StepPlan, slot: int, *, wants_hidden: bool) -> Tensor:
        count = plan.num_tokens
        size = None if wants_hidden else self._trunk.bucket(count)
        if size is not None and len(plan.rows) - plan.num_decode <= _most_prompts(size):
            self._inputs.load(plan, self._shape(size), slot)
            self._state.writer.flush()
            self._trunk.replay(size)
            self._hit(size - count)
            return self._picked
        why = "prompt logprobs" if wants_hidden else "no bucket" if size is None else "prompts"
        self.counts[f"eager: {why}"] += 1
        shape = StepShape(
            tokens=count,
            decode=plan.num_decode,
            sequences=len(plan.rows),
            blocks=self._inputs.num_blocks(plan),
            logits=sum(plan.samples),
            trims=not wants_hidden and any(plan.samples),
        )
        self._inputs.load(plan, shape, slot)
        self._state.writer.flush()
        return self._run_trunk(shape)

    def _shape(self, tokens: int) -> StepShape:
        rows = min(tokens, self._max_rows)
        blocks = self._inputs.most_blocks(tokens, min(_most_prompts(tokens), self._max_rows))
        return StepShape(tokens=tokens, decode=rows, sequences=rows, blocks=blocks, logits=rows)

    def _run_trunk(self, shape: StepShape) -> Tensor:
        hidden: Tensor = self._model(self._inputs.context(shape))
        if shape.trims:
            self._picked[: shape.logits].copy_(hidden)
        elif shape.logits:
            indices = self._inputs.logit_indices[: shape.logits]
            torch.index_select(hidden, 0, indices, out=self._picked[: shape.logits])
        return hidden

    def _run_decode(self, size: int) -> None:
        logits = self._model.logits(self._model(self._inputs.decode_context(size)))
        self._sample_plain(logits, *self._inputs.decode_rows(size))

    def _run_tail(self, size: int) -> None:
        rows, positions = self._inputs.sample_rows[:size], self._inputs.sample_positions[:size]
        self._sample_plain(self._model.logits(self._picked[:size]), rows, positions)

    def _sample_plain(self, logits: Tensor | None, rows: Tensor, positions: Tensor) -> None:
        assert logits is not None
        columns = self._state.on_device
        sample_plain(
            logits,
            rows,
            positions,
            temperatures=columns.temperature,
            inverse_temperatures=columns.inverse_temperature,
            seeds=columns.seed,
            num_top=columns.num_top,
            token_pool=self._state.token_pool.data,
            ring=self._ring,
            logprob_ring=self._logprob_ring,
            slot=self._inputs.slot,
        )

    def _sample_full(self, plan: StepPlan, count: int) -> Sampled:
        if count == 0:
            return self._from_ring(plan, 0)
        samples = np.array(plan.samples, dtype=np.bool_)
        rows = np.array(plan.rows)[samples]
        positions = (np.array(plan.starts) + np.array(plan.lens))[samples]
        logits = self._model.logits(self._picked[:count])
        assert logits is not None
        sampled = self._sampler.sample(logits, rows, positions, plan.tail)
        self._state.write_tokens(rows, positions, sampled.tokens)
        return sampled

    def _from_ring(self, plan: StepPlan, slot: int) -> Sampled:
        """What the plain tail of this step will have written."""
        num_top = self._state.host.num_top[np.array(plan.rows)[np.array(plan.samples, dtype=np.bool_)]]
        count = len(num_top)
        tokens = self._ring[slot, :count]
        if not (num_top >= 0).any():
            return Sampled(tokens=tokens)
        none = torch.empty((count, 0))
        logprobs = Logprobs(
            tokens=tokens,
            chosen=self._logprob_ring[slot, :count],
            top_ids=none,
            top_values=none,
            num_top=num_top.tolist(),
        )
        return Sampled(tokens=tokens, logprobs=logprobs, logprob_indices=range(count))

    def _hit(self, padding: int) -> None:
        self.counts["graph_hit"] += 1
        self.counts["padded_tokens"] += padding


def _most_prompts(tokens: int) -> int:
    return _PROMPTS + tokens // _PER_PROMPT
