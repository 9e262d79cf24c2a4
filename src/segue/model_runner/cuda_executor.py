"""One step on a CUDA device: captured graphs where there is one for it, the same functions where not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segue.attention.base import PagedBackend
from segue.distributed.collectives import Collectives
from segue.kernels.triton.all_reduce import OneShotAllReduce
from segue.kernels.triton.sampling import VocabPart, sample_plain
from segue.kvcache.pool import KVPool
from segue.messages.requests import SamplingMode
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.executor import prompt_logprobs, step_outputs
from segue.model_runner.graphs import (
    Graphs,
    Ladders,
    Route,
    max_forward_graph_tokens,
    most_prompts,
    most_prompts_alone,
    pick,
    prompt_sizes,
    route,
    row_sizes,
    token_sizes,
)
from segue.model_runner.inputs import prompt_runs
from segue.model_runner.sampler import Sampled, Sampler
from segue.model_runner.static_inputs import RING, DeviceInputs, StepShape
from segue.model_runner.step_result import DeviceStepResult
from segue.model_runner.stream import free_garbage
from segue.models.decoder import Decoder
from segue.sampling.logprobs import Logprobs

_LOGITS_BYTES = 64 << 20  # float32 logits of a prompt held at a time


class CUDAExecutor:
    """Runs step plans on the current stream of one rank."""

    def __init__(
        self,
        *,
        model: Decoder,
        state: BatchState,
        kv: KVPool,
        backend: PagedBackend,
        sampler: Sampler,
        collectives: Collectives,
        max_rows: int,
        chunk: int,
        row_buckets: Sequence[int] | None = None,
        token_buckets: Sequence[int] | None = None,
        self_check: bool = False,
    ) -> None:
        """`self_check`: compare what every graph gives with the same step run eagerly.

        `row_buckets` and `token_buckets` are captured instead of the ladders.
        """
        self._model = model
        self._collectives = collectives
        self._part: VocabPart | None = None
        if isinstance(collectives.one_shot, OneShotAllReduce):
            self._part = VocabPart(collectives.one_shot, model.part.vocab_start, model.config.vocab_size)
        self._state = state
        self._backend = backend
        self._sampler = sampler
        self._inputs = DeviceInputs(state, kv, backend, max_tokens=chunk + max_rows, max_slots=max_rows)
        hidden = model.config.hidden_size
        weight = model.embed.weight
        self._picked = torch.zeros((max_rows, hidden), dtype=weight.dtype, device=weight.device)
        self._ring = torch.zeros((RING, max_rows), dtype=torch.int32).pin_memory()
        self._logprob_ring = torch.zeros((RING, max_rows)).pin_memory()
        self._max_rows, self._max_tokens = max_rows, chunk + max_rows
        self._row_buckets, self._token_buckets = row_buckets, token_buckets
        self._worth = max_forward_graph_tokens(model.config.num_layers, model.weights_per_token())
        self._seen = None
        if self_check:
            self._seen = torch.zeros((max_rows, model.part.vocab_size), device=weight.device)
        picked = self._picked if self_check else None
        pool = torch.cuda.graph_pool_handle()
        self._decode = Graphs[int]("decode", pool, self._run_decode, self._seen)
        self._sampling_graphs = Graphs[int]("sampling", pool, self._run_sampling, self._seen)
        self._forward_graphs = Graphs[int](
            "forward", pool, lambda size: self._run_forward(self._shape(size)), picked
        )
        self._prompts = Graphs[int](
            "prompts", pool, lambda size: self._run_forward(self._prompts_shape(size)), picked
        )
        self._grid = Graphs[tuple[int, int]](
            "grid", pool, lambda size: self._run_forward(_grid_shape(size)), picked
        )
        self._in_graphs: Sequence[SamplingMode] = ("plain",) if self._part else ("plain", "filtered")
        self._ladders, self._tails = Ladders(sampling_modes=self._in_graphs), list[int]()

    @property
    def num_graphs(self) -> int:
        """Graphs captured."""
        kinds = (self._decode, self._sampling_graphs, self._forward_graphs, self._prompts, self._grid)
        return sum(len(kind.sizes) for kind in kinds)

    @torch.inference_mode()
    def settle(self) -> int:
        """Compile what steps above the largest forward graph need; bytes of the device then free."""
        for tokens in {min(2 * self._worth, self._max_tokens), self._max_tokens}:
            self._run_forward(self._shape(tokens))
        free_garbage()
        return torch.cuda.mem_get_info(self._state.device)[0]

    @torch.inference_mode()
    def capture(self, grid: Sequence[tuple[int, int]], has_room: Callable[[], bool]) -> list[str]:
        """Capture all graphs, behind `settle`.

        No request is there yet, and the static inputs are zeros: what is computed goes to the scratch page.

        Args:
            grid: sizes of the grid, see `grid_sizes`; the backend must support them.
            has_room: asked before every capture, and with the same answer on every rank.

        Returns:
            What was left out for want of room, by kind.
        """
        rows = row_sizes(self._max_rows, self._row_buckets)
        tokens = token_sizes(self._max_tokens, self._worth, self._token_buckets)
        left: dict[str, list[Any]] = {
            "decode": self._decode.capture(rows, has_room),
            "sampling": self._sampling_graphs.capture(rows, has_room),
            "forward": self._forward_graphs.capture(tokens, has_room),
            "prompts": self._prompts.capture(prompt_sizes(tokens), has_room),
        }
        if grid:
            self._backend.init_batch_prefill_cuda_graph_state(*map(max, zip(*grid, strict=True)))
            left["grid"] = self._grid.capture(grid, has_room, warm_ups=2)
        self._ladders = Ladders(
            sampling_modes=self._in_graphs,
            decode=self._decode.sizes,
            forward=self._forward_graphs.sizes,
            prompts=self._prompts.sizes,
            grid=self._grid.sizes,
        )
        self._tails = self._sampling_graphs.sizes
        return [f"{kind} {', '.join(map(str, sizes))}" for kind, sizes in left.items() if sizes]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> DeviceStepResult:
        """Apply the deltas, run the model, sample, and write the tokens where the next step reads them.

        At most `RING - 1` steps may be unread: their inputs and tokens lie in rings of the host's memory.
        """
        started = time.monotonic()
        self._state.apply(plan)
        slot, count = plan.step % RING, sum(plan.samples)
        way = route(plan, self._ladders)
        runs, hidden = [], self._picked
        if way.kind == "eager":
            runs = prompt_runs(plan)
            hidden = self._run_eagerly(plan, slot, wants_hidden=bool(runs))
        else:
            self._replay(plan, slot, way)
        if plan.sampling_mode not in self._in_graphs:
            sampled = self._sample_full(plan, count)
        else:
            if way.kind != "decode" and count:
                self._sample_behind_trunk(count)
            sampled = self._from_ring(plan, slot)
        owed = {
            run.slot: prompt_logprobs(self._model, self._state, hidden, run, _LOGITS_BYTES) for run in runs
        }
        return step_outputs(
            plan.step,
            started,
            sampled,
            owed,
            self._state.device,
            eager=way.reason,
            padded_tokens=way.tokens - plan.num_tokens,
        )

    def _replay(self, plan: StepPlan, slot: int, way: Route) -> None:
        """Load the inputs of a captured step and run it."""
        if way.kind == "decode":
            self._inputs.load_decode(plan, way.tokens, slot)
            self._state.writer.flush()
            self._decode.replay(way.tokens, len(plan.slots))
            return
        count = max(1, sum(plan.samples))  # where nobody samples, the first token is picked all the same
        if way.kind == "grid":
            size = (way.prompts, way.tokens // way.prompts)
            shape, replay = _grid_shape(size), partial(self._grid.replay, size, count)
        elif way.kind == "prompts":
            shape, replay = self._prompts_shape(way.tokens), partial(self._prompts.replay, way.tokens, count)
        else:
            shape, replay = self._shape(way.tokens), partial(self._forward_graphs.replay, way.tokens, count)
        self._inputs.load(plan, shape, slot)
        self._state.writer.flush()
        replay()

    def _run_eagerly(self, plan: StepPlan, slot: int, *, wants_hidden: bool) -> Tensor:
        shape = StepShape(
            tokens=plan.num_tokens,
            decode=plan.num_decode,
            sequences=len(plan.slots),
            blocks=self._inputs.num_blocks(plan),
            logits=sum(plan.samples),
            trims=not wants_hidden and any(plan.samples),
        )
        self._inputs.load(plan, shape, slot)
        self._state.writer.flush()
        return self._run_forward(shape)

    def _sample_behind_trunk(self, count: int) -> None:
        bucket = pick(self._tails, count)
        if bucket is None:
            self._run_sampling(count)
        else:
            self._sampling_graphs.replay(bucket, count)

    def _shape(self, tokens: int) -> StepShape:
        rows = min(tokens, self._max_rows)
        blocks = self._inputs.most_blocks(tokens, min(most_prompts(tokens), self._max_rows))
        return StepShape(tokens=tokens, decode=rows, sequences=rows, blocks=blocks, logits=rows)

    def _prompts_shape(self, tokens: int) -> StepShape:
        rows = min(tokens, self._max_rows, most_prompts_alone(tokens))
        blocks = self._inputs.most_blocks(tokens, rows)
        return StepShape(tokens=tokens, decode=0, sequences=rows, blocks=blocks, logits=rows)

    def _run_forward(self, shape: StepShape) -> Tensor:
        hidden: Tensor = self._model(self._inputs.context(shape))
        if shape.trims:
            self._picked[: shape.logits].copy_(hidden)
        elif shape.logits:
            indices = self._inputs.logit_indices[: shape.logits]
            torch.index_select(hidden, 0, indices, out=self._picked[: shape.logits])
        return hidden

    def _run_decode(self, size: int) -> None:
        hidden = self._model(self._inputs.decode_context(size))
        self._sample_plain(hidden, *self._inputs.decode_slots(size))

    def _run_sampling(self, size: int) -> None:
        rows, positions = self._inputs.sample_slots[:size], self._inputs.sample_positions[:size]
        self._sample_plain(self._picked[:size], rows, positions)

    def _sample_plain(self, hidden: Tensor, rows: Tensor, positions: Tensor) -> None:
        logits = self._model.local_logits(hidden)
        if self._seen is not None:
            self._seen[: len(logits)].copy_(logits)
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
            ring_index=self._inputs.ring_index,
            filters=None if self._part else (columns.top_k, columns.top_p, columns.min_p),
            part=self._part,
        )

    def _sample_full(self, plan: StepPlan, count: int) -> Sampled:
        if count == 0:
            return self._from_ring(plan, 0)
        samples = np.array(plan.samples, dtype=np.bool_)
        slots = np.array(plan.slots)[samples]
        positions = (np.array(plan.starts) + np.array(plan.lens))[samples]
        logits = self._model.logits(self._picked[:count])
        if logits is None:
            sampled = Sampled(tokens=torch.empty(count, dtype=torch.int64, device=self._picked.device))
        else:
            sampled = self._sampler.sample(logits, slots, positions, plan.sampling_mode)
        self._state.write_tokens(slots, positions, self._collectives.broadcast(sampled.tokens))
        return sampled

    def _from_ring(self, plan: StepPlan, slot: int) -> Sampled:
        """What the plain sampling of this step will have written."""
        num_top = self._state.host.num_top[np.array(plan.slots)[np.array(plan.samples, dtype=np.bool_)]]
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


def _grid_shape(size: tuple[int, int]) -> StepShape:
    """The shape of so many prompts, each padded to so many tokens."""
    count, length = size
    return StepShape(
        tokens=count * length, decode=0, sequences=count, blocks=0, logits=count, prompt_len=length
    )
