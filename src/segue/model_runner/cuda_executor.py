"""One step on a CUDA device: replays the captured graph of the step, or calls the same functions eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from segue.attention.base import PagedBackend
from segue.kernels.activations import Activations
from segue.kernels.compilations import Compilations, compiled_together
from segue.kernels.triton.all_reduce import OneShotAllReduce
from segue.kernels.triton.sampling import VocabShard, sample_plain
from segue.memory import backing, tensor_ops
from segue.messages.control import EngineLimits, GraphCost
from segue.messages.requests import SamplingMode
from segue.messages.steps import StepPlan
from segue.model_runner import warm_up
from segue.model_runner.executor import DeviceStepResult, StepExecutor, free_garbage
from segue.model_runner.graphs import (
    CaptureSizes,
    Graphs,
    Route,
    Size,
    capture_kinds,
    choose_route,
    find_bucket,
    guided_sizes,
    max_forward_graph_tokens,
    max_prefill_prompts,
    max_prompts,
    prefill_sizes,
    row_sizes,
    token_sizes,
    without_collections,
)
from segue.model_runner.inputs import PlanArrays, PromptRun
from segue.model_runner.sampler import Sampled
from segue.model_runner.static_inputs import RING, DeviceInputs, StepShape
from segue.sampling.logprobs import Logprobs


@dataclass(kw_only=True, eq=False, repr=False)
class CUDAExecutor(StepExecutor):
    """Runs step plans on the current stream of one rank.

    A step has two parts: the forward pass up to the hidden states of the tokens that sample, and sampling.
    A decode graph has both parts in one. Other steps run a graph, or eager kernels, for each. Sampled tokens
    go to the token pool, where the next step reads them, and to a ring of pinned lines, where the host reads
    them: step n uses line `n % RING`. Rows are sequences that decode or sample.
    """

    backend: PagedBackend
    max_rows: int  # sequences per step
    chunk: int  # prompt tokens per step
    row_buckets: Sequence[int] | None = None  # these two replace the default capture sizes
    token_buckets: Sequence[int] | None = None
    self_check: bool = False  # compare the outputs of every replay with those of the same step run eagerly

    logits_bytes: ClassVar[int] = 64 << 20

    def __post_init__(self) -> None:
        """Allocate the static inputs; `capture` makes the graphs."""
        model, state, max_rows = self.model, self.state, self.max_rows
        collectives = model.collectives
        self._vocab_shard: VocabShard | None = None
        self._captured_modes: Sequence[SamplingMode] = ("plain", "filtered", "guided")  # "full" runs eagerly
        if isinstance(collectives.fused_all_reduce, OneShotAllReduce):
            self._vocab_shard = VocabShard(
                collectives.fused_all_reduce, model.shard.vocab_start, model.config.vocab_size
            )
            # Each rank draws from its shard; filters need all shards, and only rank 0 has masks.
            self._captured_modes = ("plain",)
        elif collectives.tp.size > 1:  # no rank has the candidates of the others: rank 0 samples
            self._captured_modes = ()
        self._inputs = DeviceInputs(
            state,
            self.kv,
            self.backend,
            model.embed,
            vocab_start=model.shard.vocab_start,
            max_tokens=self.chunk + max_rows,
            max_slots=max_rows,
        )
        weight = model.embed.weight
        # The hidden states of the tokens that sample.
        self._sampled_hidden = torch.zeros(
            (max_rows, model.config.hidden_size), dtype=weight.dtype, device=weight.device
        )
        self._ring = backing.pinned((RING, max_rows), torch.int32, state.device).zero_()
        self._logprob_ring = backing.pinned((RING, max_rows), torch.float32, state.device).zero_()
        self._max_tokens = self.chunk + max_rows
        self._max_captured = max_forward_graph_tokens(model.config.num_layers, model.weights_per_token())
        # For the self-check: what the replays of a kind write, to be compared with an eager run.
        self._checked_logits = None
        if self.self_check:
            self._checked_logits = torch.zeros((max_rows, model.shard.vocab_size), device=weight.device)
        self._checked_hidden = self._sampled_hidden if self.self_check else None
        self._pool = torch.cuda.graph_pool_handle()
        self.capture_sizes = CaptureSizes(sampling_modes=self._captured_modes)
        self.graph_costs: dict[str, GraphCost] = {}  # of the captured graphs, by kind
        self._graphs: dict[str, Graphs[Any]] = {}
        self._shapes: dict[str, Callable[[Any], StepShape]] = {}  # of the kinds up to hidden states
        self._choosers: dict[str, Callable[[Sequence[Any], StepPlan], Route | None]] = {}
        rows = row_sizes(max_rows, self.row_buckets)
        kinds = [("decode", rows, self._run_decode), ("sampling", rows, self._run_sampling)]
        if "guided" in self._captured_modes:
            kinds += [("guided", guided_sizes(rows), self._run_guided), ("masked", rows, self._run_masked)]
        for name, sizes, run in kinds:
            self._graphs[name] = Graphs(
                name,
                sizes,
                run,
                pool=self._pool,
                checked=self._checked_hidden if name == "guided" else self._checked_logits,
                shortened=model.distinct_layers,
            )
        tokens = token_sizes(self._max_tokens, self._max_captured, self.token_buckets)
        self.register("forward", tokens, self._shape)
        self.register("prefill", prefill_sizes(tokens), self._prefill_shape)

    def register(
        self,
        name: str,
        sizes: Sequence[Size],
        shape: Callable[[Size], StepShape],
        choose: Callable[[Sequence[Size], StepPlan], Route | None] | None = None,
        warm_ups: int = 1,
    ) -> None:
        """Add a kind of graphs up to the hidden states of the tokens that sample.

        Args:
            name: the name of the kind, and of its routes.
            sizes: what to capture.
            shape: returns the shape of a step of one size.
            choose: for a kind that goes before `forward` in steps of prompts alone: returns the route to the
                captured size that fits a plan, from the plan alone, or None.
            warm_ups: eager runs before each capture; one alone has only the layers that differ.
        """
        self._shapes[name] = shape = cache(shape)
        self._graphs[name] = Graphs(
            name,
            sizes,
            lambda size: self._run_forward(shape(size)),
            pool=self._pool,
            checked=self._checked_hidden,
            shortened=nullcontext if warm_ups > 1 else self.model.distinct_layers,
            warm_ups=warm_ups,
        )
        if choose is not None:
            self._choosers[name] = choose

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs of steps and of their parts."""
        return sum(cost.num_graphs for cost in self.graph_costs.values())

    @torch.inference_mode()
    def warm_up(
        self,
        limits: EngineLimits,
        *,
        captures: bool,
        on_kernels: Callable[[int, int], None] | None = None,
    ) -> Compilations:
        """Compile every kernel that a request can lead to, see `warm_up.py`; leaves no trace in the state.

        `captures` says whether graphs are captured next: decode graphs have kernels of their own.
        `on_kernels` is called with the number of kernels that are there, and of all.
        """
        model, device = self.model, self.state.device
        steps = warm_up.row_steps(model, self.backend, limits)
        with compiled_together(device, model.shard.tp.size, on_kernels) as found, model.distinct_layers():
            for step in warm_up.all_steps(steps, limits):
                self.run(step.plan(self.state.step + 1)).result()
            self._inputs.clear()
            if captures:  # forward graphs may have a decode row per request, and a prompt beside them
                self._run_forward(self._shape(min(self._max_tokens, warm_up.NOT_FEW)))
                for size in warm_up.captured_sizes(self._graphs["decode"].to_capture, steps):
                    self._run_decode(size)
            if device.type == "cuda":
                tensor_ops.warm_up(device, model.embed.weight.dtype)
        if self.state.matchers is not None:
            self.state.matchers.forget(range(self.max_rows))
        self.state.step = 0
        free_garbage()
        return found

    @torch.inference_mode()
    def capture(self, taken: Callable[[], int], reserve: int) -> list[str]:
        """Capture all graphs; call `warm_up` first.

        There is no request yet, and the static inputs are zeros. So eager runs and first replays write keys
        and values to the scratch page, and tokens to slots whose next request writes its own first.

        Args:
            taken: returns the bytes that all graphs so far take; it must return the same on every rank.
            reserve: the bytes that all graphs together may take.

        Returns:
            The sizes that are not captured because there is no room, one text per kind.
        """
        with without_collections():
            self.state.writer.capture()
        self.graph_costs, left_out = capture_kinds(self._graphs, taken, reserve)
        captured = {name: graphs.sizes for name, graphs in self._graphs.items()}
        self.capture_sizes = CaptureSizes(
            sampling_modes=self._captured_modes,
            decode=captured["decode"],
            forward=captured["forward"],
            prefill=captured["prefill"],
            sampling=captured["sampling"],
            guided=captured.get("guided", ()),
            masked=captured.get("masked", ()),
            registered=[partial(choose, captured[name]) for name, choose in self._choosers.items()],
        )
        return [f"{kind} {', '.join(map(str, sizes))}" for kind, sizes in left_out.items()]

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Callable[[], DeviceStepResult]:
        """See `StepExecutor.start`; sampling is in the first half where a decode graph has both.

        At most `RING - 1` steps may be in flight: their inputs and tokens are in ring buffers on the host.
        """
        started = time.monotonic()
        arrays = self.state.apply(plan)
        ring_index = plan.step % RING
        route = choose_route(plan, self.capture_sizes)
        runs: list[PromptRun] = []
        hidden = self._sampled_hidden
        if route.kind == "eager":
            runs = arrays.prompt_runs()
            hidden = self._run_eagerly(arrays, ring_index, needs_all_hidden=bool(runs))
        else:
            self._replay(arrays, ring_index, route)
        return partial(self._sample_step, arrays, started, route, hidden, runs)

    @torch.inference_mode()
    def _sample_step(
        self, arrays: PlanArrays, started: float, route: Route, hidden: Tensor, runs: list[PromptRun]
    ) -> DeviceStepResult:
        """Sample behind what `start` has launched, unless that has done it; returns the step's result."""
        plan = arrays.plan
        ring_index, count = plan.step % RING, sum(plan.samples)
        # The general sampler serves the modes that no graph samples in. For the other modes sampling starts
        # here, unless the decode graph has done it.
        if count and plan.sampling_mode not in self._captured_modes:
            sampled = self._sample(arrays, self._sampled_hidden[:count])
        else:
            failures: dict[int, str] = {}
            if plan.sampling_mode == "guided" and count:
                failures = self.sampler.await_masks(arrays.sample_slots)
                self._sample_after_forward(count, guided=True)
            elif route.kind != "decode" and count:
                self._sample_after_forward(count, guided=False)
            sampled = self._from_ring(arrays, ring_index, failures)
        return self._result(
            arrays,
            started,
            sampled,
            hidden,
            runs,
            graph=None if route.kind == "eager" else route.kind,
            eager=route.reason,
            padded_tokens=route.tokens - plan.num_tokens,
        )

    def _replay(self, arrays: PlanArrays, ring_index: int, route: Route) -> None:
        """Load the inputs of a step and replay its graph."""
        if route.kind in ("decode", "guided"):
            self._inputs.load_decode(arrays, route.tokens, ring_index, apart=route.kind == "guided")
            rows = len(arrays.slots)
        else:
            self._inputs.load(arrays, self._shapes[route.kind](route.size), ring_index)
            # In a step where no sequence samples, the first token's hidden states are copied all the same.
            rows = max(1, len(arrays.sample_slots))
        self.state.writer.flush()
        self._graphs[route.kind].replay(route.size, rows)

    def _run_eagerly(self, arrays: PlanArrays, ring_index: int, *, needs_all_hidden: bool) -> Tensor:
        """Load the inputs of a step and run its forward pass without a graph and without padding.

        Returns the model's hidden states: of all tokens if they are needed or no token samples, else of the
        tokens that sample. The latter are in `_sampled_hidden` in any case.
        """
        plan, logits = arrays.plan, len(arrays.sample_slots)
        shape = StepShape(
            tokens=plan.num_tokens,
            decode=plan.num_decode,
            sequences=len(plan.slots),
            blocks=self._inputs.num_blocks(plan),
            logits=logits,
            sampled_only=not needs_all_hidden and logits > 0,
        )
        self._inputs.load(arrays, shape, ring_index)
        self.state.writer.flush()
        return self._run_forward(shape)

    def _sample_after_forward(self, count: int, *, guided: bool) -> None:
        """Sample the first `count` rows of `_sampled_hidden`, with a graph if one is large enough."""
        captured = self.capture_sizes
        kind, sizes = ("masked", captured.masked) if guided else ("sampling", captured.sampling)
        bucket = find_bucket(sizes, count)
        if bucket is not None:
            self._graphs[kind].replay(bucket, count)
        elif guided:
            self._run_masked(count)
        else:
            self._run_sampling(count)

    def _shape(self, tokens: int) -> StepShape:
        """Return the shape of the forward graph of `tokens` tokens: room for decode rows and prompts."""
        rows = min(tokens, self.max_rows)
        blocks = self._inputs.max_blocks(tokens, min(max_prompts(tokens), self.max_rows))
        return StepShape(tokens=tokens, decode=rows, sequences=rows, blocks=blocks, logits=rows)

    def _prefill_shape(self, tokens: int) -> StepShape:
        """Return the shape of the prefill graph of `tokens` tokens: room for prompts only."""
        rows = min(tokens, self.max_rows, max_prefill_prompts(tokens))
        blocks = self._inputs.max_blocks(tokens, rows)
        return StepShape(tokens=tokens, decode=0, sequences=rows, blocks=blocks, logits=rows)

    def _run_forward(self, shape: StepShape) -> Tensor:
        """Run the model on the inputs that are loaded, and copy the sampling tokens' states for sampling.

        This is what a forward graph captures. Returns the model's output, see `StepShape.sampled_only`.
        """
        hidden: Tensor = self.model(self._inputs.context(shape))
        if shape.sampled_only:
            self._sampled_hidden[: shape.logits].copy_(hidden)
        elif shape.logits:
            indices = self._inputs.logits_indices[: shape.logits]
            torch.index_select(hidden, 0, indices, out=self._sampled_hidden[: shape.logits])
        return hidden

    def _run_decode(self, size: int) -> None:
        """Run a decode step of `size` rows, from token ids to sampled tokens: a decode graph's content."""
        hidden = self.model(self._inputs.decode_context(size), reader=self.model.lm_head)
        self._sample_plain(hidden, *self._inputs.decode_slots(size))

    def _run_guided(self, size: int) -> None:
        """Run a decode step of `size` rows up to the hidden states: a guided graph's content."""
        self._sampled_hidden[:size].copy_(self.model(self._inputs.decode_context(size)))

    def _run_sampling(self, size: int, masks: tuple[Tensor, Tensor] | None = None) -> None:
        """Sample `size` rows of `_sampled_hidden`: a sampling graph's content."""
        slots, positions = self._inputs.sample_slots[:size], self._inputs.sample_positions[:size]
        self._sample_plain(self._sampled_hidden[:size], slots, positions, masks)

    def _run_masked(self, size: int) -> None:
        """Sample `size` rows of `_sampled_hidden`, some with a mask: a masked graph's content."""
        self._run_sampling(size, self.sampler.masks)

    def _sample_plain(
        self,
        hidden: Activations,
        slots: Tensor,
        positions: Tensor,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Compute the logits of `hidden` and sample a token per row, into the token pool and the ring.

        `positions` are those of the tokens to sample, in the sequences of the request slots `slots`. `masks`
        are as in `Sampler.masks`.
        """
        logits = self.model.lm_head(hidden)  # this rank's shard of the vocabulary, padding included
        if self._checked_logits is not None:
            self._checked_logits[: len(logits)].copy_(logits)
        columns = self.state.on_device
        sample_plain(
            logits,
            slots,
            positions,
            inverse_temperatures=columns.inverse_temperature,
            seeds=columns.seed,
            num_top=columns.num_top,
            token_pool=self.state.token_pool,
            ring=self._ring,
            logprob_ring=self._logprob_ring,
            ring_index=self._inputs.ring_index,
            filters=None if self._vocab_shard else (columns.top_k, columns.top_p, columns.min_p),
            masks=masks,
            part=self._vocab_shard,
        )

    def _from_ring(self, arrays: PlanArrays, ring_index: int, failures: dict[int, str]) -> Sampled:
        """Return views of the ring, which plain sampling fills when the step has run.

        A step in a captured mode reports the chosen tokens' log-probabilities at most, and no alternatives.
        """
        num_top = self.state.host.num_top[arrays.sample_slots]
        count = len(num_top)
        tokens = self._ring[ring_index, :count]
        if not (num_top >= 0).any():
            return Sampled(tokens=tokens, failures=failures)
        none = torch.empty((count, 0))  # no alternatives
        logprobs = Logprobs(
            tokens=tokens,
            chosen=self._logprob_ring[ring_index, :count],
            top_ids=none,
            top_values=none,
            num_top=num_top.tolist(),
        )
        return Sampled(tokens=tokens, logprobs=logprobs, logprob_indices=range(count), failures=failures)
