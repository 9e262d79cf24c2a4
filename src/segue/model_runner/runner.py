"""One rank's model on its device: initialised in twelve steps, it then runs one step plan after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from segue.attention import registry as attention
from segue.attention.base import AttentionBackend, AttentionShape, PagedBackend
from segue.checkpoint.load import load_weights
from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig, parse_list, parse_sizes
from segue.distributed.collectives import GroupCollectives
from segue.distributed.groups import TPGroups, connect
from segue.distributed.info import TPInfo
from segue.distributed.symmetric import all_devices_have_peer_access
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool
from segue.layers import moe_backend
from segue.logs import logger
from segue.memory.budget import (
    CPU_POOL_LIMIT,
    GRAPH_RESERVE,
    Demand,
    Reserve,
    agree_on_free,
    free_cpu_memory,
    gib,
    plan_pages,
)
from segue.memory.rank_memory import PrivateMemory
from segue.messages.control import EngineLimits, InitStep
from segue.messages.steps import StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.executor import StepExecutor
from segue.model_runner.graph_capture import capture, reserve_for_graphs, resolve_grid
from segue.model_runner.inputs import InputBuilder
from segue.model_runner.profile_run import check_sizes, make_pool, measure_activations, min_activations
from segue.model_runner.resolved_config import ResolvedConfig, resolve_config
from segue.model_runner.sampler import Sampler
from segue.model_runner.step_result import ForwardOutput
from segue.model_runner.stream import Result, free_garbage, keep_freed_memory, make_stream
from segue.models import weight_map
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder
from segue.models.registry import build_model
from segue.models.sharding import shard
from segue.weight_update.served import ServedWeights

if TYPE_CHECKING:
    from segue.model_runner.cuda_executor import CUDAExecutor


class _Progress:
    """Times the steps of the initialisation and reports each."""

    def __init__(self, report: Callable[[InitStep], None]) -> None:
        self._report = report
        self.num_bytes = 0
        self.detail = ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one step; its body may set `num_bytes` and `detail`."""
        self.num_bytes, self.detail = 0, ""
        started = time.monotonic()
        yield
        self._report(InitStep(name, time.monotonic() - started, self.num_bytes, self.detail))


class ModelRunner:
    """Runs step plans on one rank. Every rank runs the same plans in the same order."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        tp: TPInfo,
        run_dir: Path,
        report: Callable[[InitStep], None],
    ) -> None:
        """Initialise in twelve steps, each timed and reported.

        Args:
            config: the options of the engine.
            source: the checkpoint to load the weights from.
            tp: this rank.
            run_dir: a directory for the rendezvous of all ranks.
            report: called once after each step, in order.

        Raises:
            SegueError: a problem that the user can solve, with device, sizes, memory or model files.
        """
        progress = _Progress(report)
        self.tp = tp
        with progress.step("device"):
            model_config = source.config
            sizes = shard(model_config, tp)  # fails before any rank waits for another one
            resolved = resolve_config(config, source, tp)
            shape = AttentionShape(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=model_config.head_dim,
                scale=model_config.head_dim**-0.5,
            )
            setting = attention.Setting(
                shape=shape,
                device=resolved.device,
                dtype=resolved.dtype,
                page_size=resolved.page_size,
                deterministic=resolved.deterministic,
            )
            selection = attention.select(config.attention_backend, setting)
            has_experts = model_config.moe is not None
            experts = moe_backend.select(
                "auto", resolved.device, deterministic=resolved.deterministic and has_experts
            )
            self._stream = make_stream(resolved.device)
            self._memory = PrivateMemory(resolved.device)
            progress.detail = f"{resolved.device}, {resolved.dtype}, rank {tp.rank} of {tp.size}"
        # On the stream of the steps: if two threads ran parallel operations, GNU's OpenMP would count more
        # threads than cores and never let a thread spin while it waits (a step would take twice as long).
        work = partial(
            self._initialise,
            config,
            model_config,
            source,
            run_dir,
            resolved,
            shape,
            selection,
            experts,
            progress,
        )
        self._stream.submit(work).result()

    def _initialise(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        source: ModelSource,
        run_dir: Path,
        resolved: ResolvedConfig,
        shape: AttentionShape,
        selection: attention.Selection,
        experts: moe_backend.MoEEntry,
        progress: _Progress,
    ) -> None:
        """Steps 2 to 12."""
        tp = self.tp
        with progress.step("communication"):
            groups = connect(tp, rendezvous=run_dir / "rendezvous", device=resolved.device)
            progress.detail = "none: one rank" if tp.size == 1 else f"{tp.size} ranks"
            if resolved.device.type == "cuda" and tp.size > 1:
                progress.num_bytes = _add_one_shot(groups, resolved, model_config.hidden_size)
        with progress.step("free memory"):
            free_before = progress.num_bytes = _agree_on_free_memory(groups, resolved.device)
            lower_bound = min_activations(model_config, resolved)
            known = {"arena_bytes": 0, "derived": 0, "activations": lower_bound}
            demand = _demand(config, resolved, model_config, groups, free_before=free_before, **known)
            check_sizes(demand.without_graphs(), resolved)
        with progress.step("weights"):
            model = build_model(
                model_config,
                dtype=resolved.dtype,
                collectives=groups.collectives,
                moe_backend=experts.run,
                deterministic=resolved.deterministic,
            )
            self._model, self._source, self._config = model, source, config
            self.arena = load_weights(
                model, model_config, source, tp, self._memory, resolved.dtype, seed=config.seed
            )
            derived = model.build_derived()
            if resolved.device.type == "cpu":
                keep_freed_memory()
            progress.num_bytes = self.arena.num_bytes
            progress.detail = f"and {gib(derived)} of packed copies" if derived else ""
        with progress.step("page count"):
            activations = measure_activations(model, resolved, selection, shape)
            self._headroom = activations + Sampler.num_bytes(
                resolved.max_running_requests, model_config.vocab_size
            )
            demand = _demand(
                config,
                resolved,
                model_config,
                groups,
                free_before=free_before,
                arena_bytes=self.arena.num_bytes,
                derived=derived,
                activations=activations,
            )
            demand = reserve_for_graphs(
                demand,
                config,
                selection,
                experts if model_config.moe else None,
                can_capture_collectives=tp.size == 1 or groups.collectives.fused_all_reduce is not None,
            )
            captures = demand.reserve.graphs > 0
            budget = plan_pages(demand, config.num_kv_tokens)
            progress.detail = (
                f"{budget.num_pages} pages of {resolved.page_size} tokens, set by {budget.limited_by}; "
                f"longest sequence {budget.max_seq_len} tokens; a step takes {gib(activations)}"
            )
        with progress.step("KV pool"):
            kv = make_pool(model, resolved, budget.num_pages, self._memory.take_kv)
            progress.num_bytes = kv.data.nbytes
        with progress.step("page table"):
            page_table = PageTable(
                max_running=resolved.max_running_requests,
                max_seq_len=budget.max_seq_len,
                page_size=resolved.page_size,
                scratch_page=kv.scratch_page,
                device=resolved.device,
            )
            state = BatchState(
                max_running_requests=resolved.max_running_requests,
                max_seq_len=budget.max_seq_len,
                page_table=page_table,
                device=resolved.device,
            )
            progress.num_bytes = page_table.data.nbytes + state.token_pool.data.nbytes
        with progress.step("attention backend"):
            backend = selection.make(shape, kv)
            progress.detail = selection.name
        with progress.step("MoE backend"):
            progress.detail = experts.name if model_config.moe else "none: a dense model"
        with progress.step("context"):
            inputs = InputBuilder(state, kv, backend)
        with progress.step("sampler"):
            sampler = Sampler(state)
            self._executor: StepExecutor | CUDAExecutor = StepExecutor(
                model=model,
                state=state,
                inputs=inputs,
                sampler=sampler,
                collectives=groups.collectives,
            )
        with progress.step("CUDA graphs"):
            progress.detail, num_graphs = "none: steps run eagerly", 0
            has_experts = model_config.moe is not None
            grid = resolve_grid(config, resolved, backend, selection.name, has_experts, captures=captures)
            if resolved.device.type == "cuda" and (
                tp.size == 1 or groups.collectives.fused_all_reduce is not None
            ):
                self._executor = executor = _make_cuda_executor(
                    config, resolved, groups, model, state, kv, backend, sampler
                )
                if captures:
                    progress.num_bytes = capture(executor, grid, groups, resolved.device)
                    num_graphs = executor.num_graphs
                    progress.detail = f"{num_graphs} graphs"
            if config.graph_self_check and not num_graphs:
                logger.warning("--graph-self-check is ignored: there are no CUDA graphs to check")
            if (config.precompile_bs_paddings or config.precompile_token_paddings) and not num_graphs:
                logger.warning(
                    "--precompile-bs-paddings and --precompile-token-paddings are ignored: no CUDA graphs "
                    "are captured"
                )
        self.tp = tp
        self.device = resolved.device
        self.dtype = resolved.dtype
        self.vocab_size = model_config.vocab_size
        self.attention_backend = selection.name
        self.weight_bytes = self.arena.num_bytes
        self.kv = kv
        self.kv_bytes = kv.data.nbytes
        self.limits = EngineLimits(
            num_pages=budget.num_pages,
            page_size=resolved.page_size,
            max_seq_len=budget.max_seq_len,
            max_running_requests=resolved.max_running_requests,
            chunked_prefill_size=resolved.chunked_prefill_size,
        )

    def forward_batch(self, plan: StepPlan) -> ForwardOutput:
        """Submit a step and return at once; steps run in the order they are submitted.

        A step may be submitted before the result of the previous one is read: its decode rows read their
        input tokens where the previous step writes them.
        """
        return ForwardOutput(self._stream.submit(partial(self._executor.run, plan)))

    def served_weights(self) -> ServedWeights:
        """Return the weights that the model serves with, for weight updates."""
        allow = self._config.weights_master_allow
        return ServedWeights(
            arena=self.arena,
            weight_map=weight_map.build(self._source.config, self.tp),
            config=self._source.config,
            tp=self.tp,
            memory=self._memory,
            dtype=self.dtype,
            submit=self._stream.submit,
            rebuild=self._model.build_derived,
            cache_dir=Path(self._config.cache_dir),
            seed=self._config.seed,
            master_allow=tuple(parse_list(allow, ",", "weights_master_allow")) if allow else (),
            reserved=_staging_bytes(self._config),
            headroom=self._headroom,
        )

    def on_stream(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the stream of the steps, after all submitted steps, and wait for it."""
        return self._stream.submit(work).result()

    def close(self) -> None:
        """Finish all submitted steps and stop."""
        self._stream.close()


def _add_one_shot(groups: TPGroups, resolved: ResolvedConfig, hidden_size: int) -> int:
    """Add the one-shot all-reduce to the collectives if the devices have peer access.

    Returns the bytes that it takes.
    """
    from segue.kernels.triton.all_reduce import OneShotAllReduce

    assert isinstance(groups.collectives, GroupCollectives)
    if not all_devices_have_peer_access(groups.tp.size):
        logger.warning(
            "the CUDA devices cannot address each other's memory: all-reduces use NCCL, and steps run eagerly"
        )
        return 0
    fused_all_reduce = OneShotAllReduce(groups, resolved.device, hidden_size, resolved.max_running_requests)
    groups.collectives.fused_all_reduce = fused_all_reduce
    return fused_all_reduce.num_bytes


def _agree_on_free_memory(groups: TPGroups, device: torch.device) -> int:
    on_cpu = device.type == "cpu"
    if not on_cpu:
        free_garbage()
    free = free_cpu_memory() if on_cpu else torch.cuda.mem_get_info(device)[0]
    return agree_on_free([values[0] for values in groups.all_gather([free])], separate=not on_cpu)


def _make_cuda_executor(
    config: EngineConfig,
    resolved: ResolvedConfig,
    groups: TPGroups,
    model: Decoder,
    state: BatchState,
    kv: KVPool,
    backend: AttentionBackend,
    sampler: Sampler,
) -> CUDAExecutor:
    from segue.model_runner.cuda_executor import CUDAExecutor

    return CUDAExecutor(
        model=model,
        state=state,
        kv=kv,
        backend=cast(PagedBackend, backend),
        sampler=sampler,
        collectives=groups.collectives,
        max_rows=resolved.max_running_requests,
        chunk=resolved.chunked_prefill_size,
        row_buckets=_sizes(config.precompile_bs_paddings, "precompile_bs_paddings"),
        token_buckets=_sizes(config.precompile_token_paddings, "precompile_token_paddings"),
        self_check=config.graph_self_check,
    )


def _staging_bytes(config: EngineConfig) -> int:
    return int(config.weight_staging_gb * 1e9)


def _sizes(text: str | None, name: str) -> list[int] | None:
    return None if text is None else parse_sizes(text, name)


def _demand(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: ModelConfig,
    groups: TPGroups,
    *,
    free_before: int,
    arena_bytes: int,
    derived: int,
    activations: int,
) -> Demand:
    """Return the sizes that the page count depends on; the same on all ranks."""
    # The maximum over the ranks, so that all ranks compute the same number of pages, or raise the same error.
    gathered = groups.all_gather([arena_bytes, derived, activations])
    arena_bytes, derived, activations = (max(values) for values in zip(*gathered, strict=True))
    on_cpu = resolved.device.type == "cpu"
    reserve = Reserve(
        batch_state=BatchState.num_bytes(
            max_running_requests=resolved.max_running_requests,
            max_seq_len=resolved.max_len,
            page_size=resolved.page_size,
        ),
        derived=derived,
        activations=activations,
        sampling=Sampler.num_bytes(resolved.max_running_requests, model.vocab_size),
        graphs=0 if on_cpu or config.disable_cuda_graph else GRAPH_RESERVE,
        staging=_staging_bytes(config),
    )
    return Demand(
        free_before=free_before,
        memory_ratio=config.memory_ratio,
        arena_bytes=arena_bytes,
        reserve=reserve,
        page_bytes=resolved.kv_shape(model, shard(model, groups.tp), 0).page_bytes,
        page_size=resolved.page_size,
        max_len=resolved.max_len,
        max_running_requests=resolved.max_running_requests,
        local_ranks=groups.tp.size if on_cpu else 1,
        pool_limit=CPU_POOL_LIMIT if on_cpu else None,
    )
