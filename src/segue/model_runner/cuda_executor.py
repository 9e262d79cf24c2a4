"""One step on a CUDA device: replays the captured graph of the step, or calls the same functions eagerly."""

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
from segue.kernels.triton.sampling import VocabShard, sample_plain
from segue.kvcache.pool import KVPool
from segue.messages.requests import SamplingMode
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.executor import prompt_logprobs, step_outputs
from segue.model_runner.graphs import (
    CaptureSizes,
    Graphs,
    Route,
    choose_route,
    find_bucket,
    max_forward_graph_tokens,
    max_prefill_prompts,
    max_prompts,
    prefill_sizes,
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

_LOGITS_BYTES = 64 << 20  # float32 logits of prompt tokens held at a time


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
        """Allocate the static inputs; `capture` makes the graphs.

        With `self_check`, the outputs of every replay are compared with those of the same step run eagerly.
        `row_buckets` and `token_buckets` replace the default capture sizes.
        """
        self._model = model
        self._collectives = collectives
        self._vocab_shard: VocabShard | None = None
        if isinstance(collectives.fused_all_reduce, OneShotAllReduce):
            self._vocab_shard = VocabShard(
                collectives.fused_all_reduce, model.shard.vocab_start, model.config.vocab_size
            )
        self._state = state
        self._backend = backend
        self._sampler = sampler
        self._inputs = DeviceInputs(state, kv, backend, max_tokens=chunk + max_rows, max_slots=max_rows)
        hidden = model.config.hidden_size
        weight = model.embed.weight
        # The hidden states of the tokens that sample.
        self._sampled_hidden = torch.zeros((max_rows, hidden), dtype=weight.dtype, device=weight.device)
        self._ring = torch.zeros((RING, max_rows), dtype=torch.int32).pin_memory()
        self._logprob_ring = torch.zeros((RING, max_rows)).pin_memory()
        self._max_rows, self._max_tokens = max_rows, chunk + max_rows
        self._row_buckets, self._token_buckets = row_buckets, token_buckets
        self._max_captured = max_forward_graph_tokens(model.config.num_layers, model.weights_per_token())
        self._checked_logits = None
        if self_check:
            self._checked_logits = torch.zeros((max_rows, model.shard.vocab_size), device=weight.device)
        checked_hidden = self._sampled_hidden if self_check else None
        pool = torch.cuda.graph_pool_handle()
        self._decode_graphs = Graphs[int]("decode", pool, self._run_decode, self._checked_logits)
        self._sampling_graphs = Graphs[int]("sampling", pool, self._run_sampling, self._checked_logits)
        self._forward_graphs = Graphs[int](
            "forward", pool, lambda size: self._run_forward(self._shape(size)), checked_hidden
        )
        self._prefill_graphs = Graphs[int](
            "prefill", pool, lambda size: self._run_forward(self._prefill_shape(size)), checked_hidden
        )
        self._grid_graphs = Graphs[tuple[int, int]](
            "grid", pool, lambda size: self._run_forward(_grid_shape(size)), checked_hidden
        )
        self._captured_modes: Sequence[SamplingMode] = (
            ("plain",) if self._vocab_shard else ("plain", "filtered")
        )
        self._capture_sizes = CaptureSizes(sampling_modes=self._captured_modes)
        self._sampling_sizes = list[int]()

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        kinds = (
            self._decode_graphs,
            self._sampling_graphs,
            self._forward_graphs,
            self._prefill_graphs,
            self._grid_graphs,
        )
        return sum(len(kind.sizes) for kind in kinds)

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Compile the kernels of steps above the largest forward graph.

        Returns the bytes of the device that are free afterwards.
        """
        for tokens in {min(2 * self._max_captured, self._max_tokens), self._max_tokens}:
            self._run_forward(self._shape(tokens))
        free_garbage()
        return torch.cuda.mem_get_info(self._state.device)[0]

    @torch.inference_mode()
    def capture(self, grid: Sequence[tuple[int, int]], has_room: Callable[[], bool]) -> list[str]:
        """Capture all graphs; call `warm_up` first.

        There is no request yet, and the static inputs are zeros, so keys and values go to the scratch page.

        Args:
            grid: the sizes of the grid, see `grid_sizes`; the backend must support them.
            has_room: called before every capture; it must return the same on every rank.

        Returns:
            The sizes that are not captured because there is no room, one text per kind.
        """
        rows = row_sizes(self._max_rows, self._row_buckets)
        tokens = token_sizes(self._max_tokens, self._max_captured, self._token_buckets)
        left_out: dict[str, list[Any]] = {
            "decode": self._decode_graphs.capture(rows, has_room),
            "sampling": self._sampling_graphs.capture(rows, has_room),
            "forward": self._forward_graphs.capture(tokens, has_room),
            "prefill": self._prefill_graphs.capture(prefill_sizes(tokens), has_room),
        }
        if grid:
            self._backend.init_batch_prefill_cuda_graph_state(*map(max, zip(*grid, strict=True)))
            left_out["grid"] = self._grid_graphs.capture(grid, has_room, warm_ups=2)
        self._capture_sizes = CaptureSizes(
            sampling_modes=self._captured_modes,
            decode=self._decode_graphs.sizes,
            forward=self._forward_graphs.sizes,
            prefill=self._prefill_graphs.sizes,
            grid=self._grid_graphs.sizes,
        )
        self._sampling_sizes = self._sampling_graphs.sizes
        return [f"{kind} {', '.join(map(str, sizes))}" for kind, sizes in left_out.items() if sizes]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> DeviceStepResult:
        """Apply the plan, run the model, sample, and write the tokens where the next step reads them.

        At most `RING - 1` steps may be in flight: their inputs and tokens are in ring buffers on the host.
        """
        started = time.monotonic()
        self._state.apply(plan)
        ring_index, count = plan.step % RING, sum(plan.samples)
        route = choose_route(plan, self._capture_sizes)
        runs, hidden = [], self._sampled_hidden
        if route.kind == "eager":
            runs = prompt_runs(plan)
            hidden = self._run_eagerly(plan, ring_index, needs_all_hidden=bool(runs))
        else:
            self._replay(plan, ring_index, route)
        if plan.sampling_mode not in self._captured_modes:
            sampled = self._sample_full(plan, count)
        else:
            if route.kind != "decode" and count:
                self._sample_after_forward(count)
            sampled = self._from_ring(plan, ring_index)
        prompt_parts = {
            run.slot: prompt_logprobs(self._model, self._state, hidden, run, _LOGITS_BYTES) for run in runs
        }
        return step_outputs(
            plan.step,
            started,
            sampled,
            prompt_parts,
            self._state.device,
            eager=route.reason,
            padded_tokens=route.tokens - plan.num_tokens,
        )

    def _replay(self, plan: StepPlan, ring_index: int, route: Route) -> None:
        """Load the inputs of a step and replay its graph."""
        if route.kind == "decode":
            self._inputs.load_decode(plan, route.tokens, ring_index)
            self._state.writer.flush()
            self._decode_graphs.replay(route.tokens, len(plan.slots))
            return
        # In a step where no sequence samples, the first token's hidden states are copied all the same.
        tokens, count = route.tokens, max(1, sum(plan.samples))
        if route.kind == "grid":
            size = (route.prompts, tokens // route.prompts)
            shape, replay = _grid_shape(size), partial(self._grid_graphs.replay, size, count)
        elif route.kind == "prefill":
            shape, replay = self._prefill_shape(tokens), partial(self._prefill_graphs.replay, tokens, count)
        else:
            shape, replay = self._shape(tokens), partial(self._forward_graphs.replay, tokens, count)
        self._inputs.load(plan, shape, ring_index)
        self._state.writer.flush()
        replay()

    def _run_eagerly(self, plan: StepPlan, ring_index: int, *, needs_all_hidden: bool) -> Tensor:
        shape = StepShape(
            tokens=plan.num_tokens,
            decode=plan.num_decode,
            sequences=len(plan.slots),
            blocks=self._inputs.num_blocks(plan),
            logits=sum(plan.samples),
            sampled_only=not needs_all_hidden and any(plan.samples),
        )
        self._inputs.load(plan, shape, ring_index)
        self._state.writer.flush()
        return self._run_forward(shape)

    def _sample_after_forward(self, count: int) -> None:
        bucket = find_bucket(self._sampling_sizes, count)
        if bucket is None:
            self._run_sampling(count)
        else:
            self._sampling_graphs.replay(bucket, count)

    def _shape(self, tokens: int) -> StepShape:
        rows = min(tokens, self._max_rows)
        blocks = self._inputs.max_blocks(tokens, min(max_prompts(tokens), self._max_rows))
        return StepShape(tokens=tokens, decode=rows, sequences=rows, blocks=blocks, logits=rows)

    def _prefill_shape(self, tokens: int) -> StepShape:
        rows = min(tokens, self._max_rows, max_prefill_prompts(tokens))
        blocks = self._inputs.max_blocks(tokens, rows)
        return StepShape(tokens=tokens, decode=0, sequences=rows, blocks=blocks, logits=rows)

    def _run_forward(self, shape: StepShape) -> Tensor:
        hidden: Tensor = self._model(self._inputs.context(shape))
        if shape.sampled_only:
            self._sampled_hidden[: shape.logits].copy_(hidden)
        elif shape.logits:
            indices = self._inputs.logits_indices[: shape.logits]
            torch.index_select(hidden, 0, indices, out=self._sampled_hidden[: shape.logits])
        return hidden

    def _run_decode(self, size: int) -> None:
        hidden = self._model(self._inputs.decode_context(size))
        self._sample_plain(hidden, *self._inputs.decode_slots(size))

    def _run_sampling(self, size: int) -> None:
        slots, positions = self._inputs.sample_slots[:size], self._inputs.sample_positions[:size]
        self._sample_plain(self._sampled_hidden[:size], slots, positions)

    def _sample_plain(self, hidden: Tensor, slots: Tensor, positions: Tensor) -> None:
        logits = self._model.local_logits(hidden)
        if self._checked_logits is not None:
            self._checked_logits[: len(logits)].copy_(logits)
        columns = self._state.on_device
        sample_plain(
            logits,
            slots,
            positions,
            temperatures=columns.temperature,
            inverse_temperatures=columns.inverse_temperature,
            seeds=columns.seed,
            num_top=columns.num_top,
            token_pool=self._state.token_pool.data,
            ring=self._ring,
            logprob_ring=self._logprob_ring,
            ring_index=self._inputs.ring_index,
            filters=None if self._vocab_shard else (columns.top_k, columns.top_p, columns.min_p),
            part=self._vocab_shard,
        )

    def _sample_full(self, plan: StepPlan, count: int) -> Sampled:
        if count == 0:
            return self._from_ring(plan, 0)
        samples = np.array(plan.samples, dtype=np.bool_)
        slots = np.array(plan.slots)[samples]
        positions = (np.array(plan.starts) + np.array(plan.lens))[samples]
        logits = self._model.logits(self._sampled_hidden[:count])
        if logits is None:
            sampled = Sampled(
                tokens=torch.empty(count, dtype=torch.int64, device=self._sampled_hidden.device)
            )
        else:
            sampled = self._sampler.sample(logits, slots, positions, plan.sampling_mode)
        self._state.write_tokens(slots, positions, self._collectives.broadcast(sampled.tokens))
        return sampled

    def _from_ring(self, plan: StepPlan, ring_index: int) -> Sampled:
        """Return views of the ring, which plain sampling fills when the step has run."""
        num_top = self._state.host.num_top[np.array(plan.slots)[np.array(plan.samples, dtype=np.bool_)]]
        count = len(num_top)
        tokens = self._ring[ring_index, :count]
        if not (num_top >= 0).any():
            return Sampled(tokens=tokens)
        none = torch.empty((count, 0))
        logprobs = Logprobs(
            tokens=tokens,
            chosen=self._logprob_ring[ring_index, :count],
            top_ids=none,
            top_values=none,
            num_top=num_top.tolist(),
        )
        return Sampled(tokens=tokens, logprobs=logprobs, logprob_indices=range(count))


def _grid_shape(size: tuple[int, int]) -> StepShape:
    count, prompt_len = size
    return StepShape(
        tokens=count * prompt_len, decode=0, sequences=count, blocks=0, logits=count, prompt_len=prompt_len
    )
