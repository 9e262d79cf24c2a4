"""The initialisation of a runner: steps, each of which makes what later ones need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from msgspec import structs

from segue.attention.base import PagedBackend
from segue.checkpoint.kv_scales import read_kv_scales
from segue.checkpoint.load import load_weights
from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.groups import all_devices_have_peer_access, connect
from segue.distributed.info import TPInfo
from segue.guided.matchers import Matchers
from segue.guided.processes import ProcessMatchers, count_for
from segue.host import free_cpu_memory, keep_freed_memory, usable_cores
from segue.kvcache.page_table import PageTable
from segue.laps.cost import StepTime
from segue.logs import logger
from segue.memory.budget import (
    GRAPH_RESERVE,
    Budget,
    Demand,
    afford_graphs,
    agree_on_free,
    check_standby,
    gib,
    plan_pages,
    standby_bytes,
)
from segue.memory.geometry import KVGeometry, check_pinned
from segue.memory.rank_memory import PrivateMemory, RankMemory, SharedKVMemory
from segue.memory.releasable import ReleasableMemory
from segue.messages.control import EngineLimits, GraphCost
from segue.model_runner import grid
from segue.model_runner.batch_state import BatchState
from segue.model_runner.demand import make_demand
from segue.model_runner.eager import why_impossible
from segue.model_runner.executor import StepExecutor, free_garbage
from segue.model_runner.graphs import GraphMeter, describe_costs
from segue.model_runner.mask_table import MaskTable
from segue.model_runner.profile_run import check_sizes, make_pool, measure_activations, min_activations
from segue.model_runner.sampler import Sampler
from segue.model_runner.service_start import make_service_memory
from segue.model_runner.start_choice import choose_start
from segue.model_runner.step_times import describe_times, time_steps
from segue.models.decoder import build_model
from segue.options import parse_sizes

if TYPE_CHECKING:
    from segue.model_runner.cuda_executor import CUDAExecutor

_EAGER = "none: steps run eagerly"

Made = tuple[int, str]  # the bytes that a step has allocated, and what it says about itself


@dataclass(eq=False, repr=False)
class Startup:
    """Makes the parts of a runner. Every rank takes the same steps, some of them together.

    Each step is a method: it keeps what it makes in attributes, for later steps and for the runner, and
    returns the bytes that it has allocated with a text for the log of the start.
    """

    config: EngineConfig
    source: ModelSource
    tp: TPInfo
    run_dir: Path  # for the rendezvous of all ranks
    step_times: Sequence[StepTime] = ()  # none without LAPS, which needs them most
    matchers: Matchers | None = None  # of guided requests
    _masks: MaskTable | None = None  # that they write
    on_bytes: Callable[[int, int], None] | None = None  # while weights are loaded: bytes so far and in all
    on_kernels: Callable[[int, int], None] | None = None  # while kernels are compiled: as `on_bytes`

    def steps(self) -> list[tuple[str, Callable[[], Made]]]:
        """Return the steps by name, in order. The first one waits for no other rank and uses no stream."""
        return [
            ("device", self._choose),
            ("communication", self._connect),
            ("free memory", self._measure_memory),
            ("weights", self._load_weights),
            ("GEMM plans", self._plan_gemms),
            ("page count", self._count_pages),
            ("KV pool", self._make_pool),
            ("page table", self._make_state),
            ("attention backend", self._make_backend),
            ("MoE backend", self._name_experts),
            ("sampler", self._make_sampler),
            ("kernels", self._make_executor),
            ("CUDA graphs", self._capture_graphs),
            *([("step times", self._time_steps)] if self.config.enable_laps_scheduler else []),
        ]

    def _choose(self) -> Made:
        """Choose the device, the sizes and the backends for attention and experts; allocates nothing."""
        model, tp = self.source.config, self.tp
        chosen = choose_start(self.config, self.source, tp)  # fails before any rank waits for another one
        self.resolved = resolved = chosen.resolved
        self._shape, self.selection, self._experts = chosen.setting.shape, chosen.selection, chosen.experts
        self._page_bytes = resolved.kv_shape(model, chosen.sizes, num_pages=0).page_bytes
        self._on_cpu = resolved.device.type == "cpu"
        self._kv_scales = read_kv_scales(self.source) if resolved.fp8_kv else None
        fp8 = ", linear layers in FP8" if model.fp8 is not None else ""
        return 0, f"{resolved.device}, {resolved.dtype}{fp8}, rank {tp.rank} of {tp.size}"

    def _connect(self) -> Made:
        """Connect the ranks, and find out whether their collectives can be captured in CUDA graphs.

        Also chooses where the large memory comes from: ranks agree about weights that they share.
        """
        tp, device = self.tp, self.resolved.device
        self._groups = connect(tp, rendezvous=self.run_dir / "rendezvous", device=device)
        num_bytes = 0 if self._on_cpu or tp.size == 1 else self._add_one_shot()
        self.memory = self._choose_memory()
        self._can_capture_collectives = tp.size == 1 or self._groups.collectives.fused_all_reduce is not None
        return num_bytes, "none: one rank" if tp.size == 1 else f"{tp.size} ranks"

    def _choose_memory(self) -> RankMemory:
        config, resolved = self.config, self.resolved
        if config.shares_weights:
            return make_service_memory(config, self.source, resolved.device, resolved.dtype, self._groups)
        if config.enable_memory_saver:
            return ReleasableMemory(resolved.device, parks_kv=config.parks_kv)
        # Its role may change: any engine that hands KV over may once take it over.
        kind = SharedKVMemory if config.role != "both" else PrivateMemory
        return kind(resolved.device)

    def _add_one_shot(self) -> int:
        """Add the one-shot all-reduce to the collectives if devices have peer access; returns its bytes."""
        from segue.kernels.triton.all_reduce import OneShotAllReduce

        if not all_devices_have_peer_access(self.tp.size):
            logger.warning(
                "the CUDA devices cannot address each other's memory: all-reduces use NCCL, and steps run "
                "eagerly"
            )
            return 0
        self._groups.collectives.fused_all_reduce = fused_all_reduce = OneShotAllReduce(
            self._groups,
            self.resolved.device,
            self.source.config.hidden_size,
            self.resolved.max_running_requests,
        )
        return fused_all_reduce.num_bytes

    def _measure_memory(self) -> Made:
        """Measure the free memory, the least of all ranks, and refuse sizes that cannot fit into it.

        It comes before the weights: the page count starts from this number, and loading may take minutes.
        """
        self._free_before = self._free()
        if self.memory.pinned_kv() is None:  # else the sizes are there, and others have their memory already
            demand = self._demand(activations=min_activations(self.source.config, self.resolved))
            check_sizes(demand.without_graphs(), self.resolved)
        return self._free_before, ""

    def _free(self) -> int:
        """Return the bytes that are free now, the least of all ranks."""
        if self._on_cpu:
            free = free_cpu_memory()
        else:
            free_garbage()
            free = torch.cuda.mem_get_info(self.resolved.device)[0]
        gathered = [values[0] for values in self._groups.all_gather([free])]
        return agree_on_free(gathered, separate=not self._on_cpu)

    def _load_weights(self) -> Made:
        """Build the model without memory, load its weights into an arena, and derive the packed copies."""
        config, source, resolved = self.config, self.source, self.resolved
        self.model = build_model(
            source.config,
            dtype=resolved.dtype,
            collectives=self._groups.collectives,
            moe_backend=self._experts.run,
            deterministic=resolved.deterministic,
        )
        self.arena = load_weights(
            self.model,
            source.config,
            source,
            self.tp,
            self.memory,
            resolved.dtype,
            seed=config.seed,
            on_bytes=self.on_bytes,
        )
        self._derived = self.model.build_derived()
        if self._on_cpu:
            keep_freed_memory()
        return self.arena.num_bytes, f"and {gib(self._derived)} of packed copies" if self._derived else ""

    def _plan_gemms(self) -> Made:
        """Find the plans of GEMMs; timing them would disturb an engine that may serve on this device."""
        if self._on_cpu:
            return 0, "none: they are for CUDA"
        from segue.model_runner.gemm_plans import plan_gemms

        is_alone = self.memory.pinned_kv() is None
        return 0, plan_gemms(self.config, self.model, self._groups, may_time=is_alone)

    def _count_pages(self) -> Made:
        """Measure what a step takes, and decide the number of KV pages from the rest of the memory.

        Also decides whether graphs are captured (`_captures`), because they have a share of the memory.
        """
        resolved, model = self.resolved, self.source.config
        activations = measure_activations(self.model, resolved, self.selection, self._shape)
        self.headroom = activations + Sampler.num_bytes(resolved.max_running_requests, model.vocab_size)
        demand = self._reserve_for_graphs(
            self._demand(arena_bytes=self.arena.num_bytes, derived=self._derived, activations=activations)
        )
        self._captures = demand.reserve.graphs > 0
        budget = self._pages_of_cohort(demand)
        self.limits = EngineLimits(
            num_pages=budget.num_pages,
            page_size=resolved.page_size,
            max_seq_len=budget.max_seq_len,
            max_running_requests=resolved.max_running_requests,
            chunked_prefill_size=resolved.chunked_prefill_size,
            laps=resolved.laps,
        )
        return 0, (
            f"{budget.num_pages} pages of {resolved.page_size} tokens, set by {budget.limited_by}; "
            f"longest sequence {budget.max_seq_len} tokens; a step takes {gib(activations)}"
        )

    def _pages_of_cohort(self, demand: Demand) -> Budget:
        """Return the number of pages: the first engine of a cohort decides it for all of them.

        Raises:
            ConfigError: an option has another value than on the first engine.
            OutOfMemoryError: the device has too little memory for as many pages, or for any.
        """
        resolved, num_kv_tokens = self.resolved, self.config.num_kv_tokens
        pinned = self.memory.pinned_kv()
        if pinned is None:
            budget = plan_pages(demand, num_kv_tokens)
        else:
            by = "the first engine of the cohort"
            budget = Budget(num_pages=pinned.num_pages, max_seq_len=pinned.max_seq_len, limited_by=by)
        own = KVGeometry(
            num_pages=budget.num_pages,
            max_seq_len=budget.max_seq_len,
            page_size=resolved.page_size,
            page_bytes=self._page_bytes,
            max_running_requests=resolved.max_running_requests,
            chunked_prefill_size=resolved.chunked_prefill_size,
        )
        holds = self.memory.pin_kv(own)
        if pinned is not None or holds != own:
            check_pinned(holds, own=own, max_len=resolved.max_len, num_kv_tokens=num_kv_tokens)
            free = self._free()
            if demand.reserve.graphs and standby_bytes(demand, holds.kv_bytes) > free:
                logger.warning("no CUDA graphs: other engines have their memory; steps run eagerly")
                demand, self._captures = demand.without_graphs(), False
            check_standby(demand, free, holds.kv_bytes)
        return replace(budget, num_pages=holds.num_pages, max_seq_len=holds.max_seq_len)

    def _make_pool(self) -> Made:
        take = partial(self.memory.take_kv, scratch_bytes=self._page_bytes)
        self.kv = make_pool(self.model, self.resolved, self.limits.num_pages, take, self._kv_scales)
        return self.kv.data.nbytes, self.kv.format

    def _make_state(self) -> Made:
        """Allocate what the device keeps per request slot: pages, tokens and sampling parameters."""
        limits = self.limits
        page_table = PageTable(
            max_running=limits.max_running_requests,
            max_seq_len=limits.max_seq_len,
            page_size=limits.page_size,
            scratch_page=self.kv.scratch_page,
            device=self.resolved.device,
        )
        self._state = BatchState(page_table, limits.max_seq_len)
        if self.tp.rank == 0:  # only it samples
            slots, vocab_size = len(page_table.data), self.source.config.vocab_size
            share = torch.get_num_threads() * self.tp.size  # see `OMP_NUM_THREADS` of a cluster
            processes = count_for(self.resolved.device.type, usable_cores(), share)
            self._masks = masks = MaskTable(slots, vocab_size, self.resolved.device, shared=processes > 0)
            self.matchers = Matchers(masks.host)
            if masks.descriptor is not None:
                self.matchers = ProcessMatchers(masks.host, masks.descriptor, processes)
            self._state.masks, self._state.matchers = masks, self.matchers
        return page_table.data.nbytes + self._state.token_pool.nbytes, ""

    def free_masks(self) -> None:
        """Free the masks of guided requests, when no step runs any more."""
        if self._masks is not None:
            self._masks.close()

    def _make_backend(self) -> Made:
        self._backend = self.selection.make(self._shape, self.kv)
        return 0, self.selection.name

    def _name_experts(self) -> Made:
        """Only report the MoE backend, which `_choose` has selected and `_load_weights` has used."""
        return 0, self._experts.name if self.source.config.moe else "none: a dense model"

    def _make_sampler(self) -> Made:
        self._sampler = Sampler(self._state)
        return 0, ""

    def _make_executor(self) -> Made:
        """Make the executor of steps, and on CUDA compile all kernels that a step can need."""
        if not self._on_cpu:
            return self._make_cuda_executor()
        self.executor = StepExecutor(
            model=self.model,
            state=self._state,
            kv=self.kv,
            backend=self._backend,
            sampler=self._sampler,
        )
        return 0, "none for a GPU"

    def _time_steps(self) -> Made:
        """Time some steps, for the scheduler's predictions."""
        vocab_size = self.source.config.vocab_size
        self.step_times = time_steps(self.executor, self.limits, vocab_size, self._groups.all_gather)
        return 0, describe_times(self.step_times)

    def _make_cuda_executor(self) -> Made:
        """Make the executor for CUDA, and compile the kernels."""
        from segue.model_runner.cuda_executor import CUDAExecutor

        config = self.config
        executor = CUDAExecutor(
            model=self.model,
            state=self._state,
            kv=self.kv,
            backend=cast(PagedBackend, self._backend),
            sampler=self._sampler,
            max_rows=self.limits.max_running_requests,
            chunk=self.limits.chunked_prefill_size,
            row_buckets=_sizes(config.precompile_bs_paddings, "precompile_bs_paddings"),
            token_buckets=_sizes(config.precompile_token_paddings, "precompile_token_paddings"),
            self_check=config.graph_self_check,
        )
        self.executor = executor
        kernels = executor.warm_up(self.limits, captures=self._captures, on_kernels=self.on_kernels)
        return 0, f"{kernels.compiled} compiled, {kernels.loaded} loaded from the cache on disk"

    def _capture_graphs(self) -> Made:
        """Capture the graphs of the executor for CUDA, if there are any."""
        self.graph_costs: dict[str, GraphCost] = {}
        sizes = grid.resolve_grid(
            self.config,
            self.resolved,
            self._backend,
            self.selection.name,
            moe=self.source.config.moe is not None,
            captures=self._captures,
        )
        num_bytes = 0
        if self._captures:
            executor = cast("CUDAExecutor", self.executor)
            grid.register(executor, sizes)
            num_bytes = self._capture(executor)
            self.graph_costs = executor.graph_costs
            self.limits = structs.replace(self.limits, step_sizes=list(executor.capture_sizes.forward))
        if self.graph_costs:
            return num_bytes, describe_costs(self.graph_costs)
        self._warn_without_graphs()
        return num_bytes, "0 graphs" if self._captures else _EAGER

    def _warn_without_graphs(self) -> None:
        """Warn of options about CUDA graphs that have no effect, because there are no graphs."""
        config = self.config
        if config.graph_self_check:
            logger.warning("--graph-self-check is ignored: there are no CUDA graphs to check")
        if config.precompile_bs_paddings or config.precompile_token_paddings:
            logger.warning(
                "--precompile-bs-paddings and --precompile-token-paddings are ignored: no CUDA graphs are "
                "captured"
            )

    def _demand(self, *, arena_bytes: int = 0, derived: int = 0, activations: int) -> Demand:
        """Return the sizes that the page count depends on; the same on all ranks.

        It is called twice: before loading with lower bounds, to refuse early, and then with measured bytes.
        """
        # The maximum over the ranks, so that all ranks compute the same number of pages, or raise the same
        # error.
        gathered = self._groups.all_gather([arena_bytes, derived, activations])
        arena_bytes, derived, activations = (max(values) for values in zip(*gathered, strict=True))
        return make_demand(
            self.config,
            self.resolved,
            self.source.config,
            ranks=self.tp.size,
            free_before=self._free_before,
            page_bytes=self._page_bytes,
            parks_kv=self.memory.parks_kv,
            arena_bytes=arena_bytes,
            derived=derived,
            activations=activations,
        )

    def _reserve_for_graphs(self, demand: Demand) -> Demand:
        """Return the demand, without memory for graphs if none can be captured; a warning says why."""
        reserved = demand.reserve.graphs
        if not reserved:
            return demand
        if reason := why_impossible(self.selection, self.source.config, self._experts):
            logger.warning("%s: all steps run eagerly and launch every kernel", reason)
        elif not self._affords_graphs(demand):
            logger.warning(
                "no CUDA graphs: the %s reserved for them would leave less than that for KV, or no room for "
                "--num-kv-tokens; steps run eagerly. Raise --memory-ratio, lower --num-kv-tokens, "
                "--chunked-prefill-size or --max-running-requests, or free memory",
                gib(reserved),
            )
        elif self._can_capture_collectives:  # if not, a warning has been logged already
            return demand
        return demand.without_graphs()

    def _affords_graphs(self, demand: Demand) -> bool:
        """Whether graphs have room beside the KV cache, or beside the other engines of the cohort."""
        pinned = self.memory.pinned_kv()
        if pinned is None:
            return afford_graphs(demand, self.config.num_kv_tokens)
        return standby_bytes(demand, pinned.kv_bytes) <= self._free()

    def _capture(self, executor: CUDAExecutor) -> int:
        """Capture the graphs and return the bytes that they take, on the rank where they take most.

        The graphs may take `GRAPH_RESERVE` bytes, because KV pages and activations have the rest. Sizes that
        do not fit are left out on every rank alike: their steps run eagerly, slower but with correct results.
        """
        num_layers, is_alone = self.source.config.num_layers, not self.config.shares_weights
        meter = GraphMeter(self.resolved.device, num_layers=num_layers, is_alone=is_alone)

        def taken() -> int:
            """Return the bytes that all graphs so far take, the maximum of the ranks."""
            return max(values[0] for values in self._groups.all_gather([meter.read()]))

        left_out = executor.capture(taken, GRAPH_RESERVE)
        used = taken()
        if left_out:
            logger.warning(
                "%d CUDA graphs took %s of the %s reserved for them; sizes left out, to run eagerly: %s. "
                "Lower --max-running-requests or --chunked-prefill-size, or shorten "
                "--batch-prefill-batch-sizes",
                executor.num_graphs,
                gib(used),
                gib(GRAPH_RESERVE),
                "; ".join(left_out),
            )
        return used


def _sizes(text: str | None, name: str) -> list[int] | None:
    return None if text is None else parse_sizes(text, name)
