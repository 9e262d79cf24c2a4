"""The grid: graphs of steps of prompts alone, each prompt padded at its front to one length.

The option is `--enable-batch-prefill-cuda-graph`. There is one graph per number and length of prompts. A
backend's part of it is in `attention/base.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segue.attention.base import AttentionBackend
from segue.config import EngineConfig
from segue.logs import logger
from segue.messages.steps import StepPlan
from segue.model_runner.graphs import Route, max_padded_tokens
from segue.model_runner.resolved_config import ResolvedConfig
from segue.model_runner.static_inputs import StepShape
from segue.options import parse_sizes

if TYPE_CHECKING:
    from segue.model_runner.cuda_executor import CUDAExecutor

GridSize = tuple[int, int]  # prompts, tokens per prompt


def register(executor: CUDAExecutor, sizes: Sequence[GridSize]) -> None:
    """Let `executor` capture and replay the grid of `sizes`, which its backend must support."""
    if sizes:
        # The backend gets the largest number of prompts and the largest length.
        executor.backend.init_batch_prefill_cuda_graph_state(*map(max, zip(*sizes, strict=True)))
        executor.register("grid", sizes, _shape, choose, warm_ups=2)


def choose(sizes: Sequence[GridSize], plan: StepPlan) -> Route | None:
    """Return the smallest of `sizes` that holds a step of prompts, unless it would be mostly padding."""
    sequences, max_len = len(plan.slots), max(plan.lens)
    fitting = [size for size in sizes if size[0] >= sequences and size[1] >= max_len]
    count, length = min(fitting, key=lambda size: size[0] * size[1], default=(0, 0))
    if not 0 < count * length <= max_padded_tokens(plan.num_tokens):
        return None
    return Route("grid", count * length, prompts=count)


def grid_sizes(
    prompts: Sequence[int], lengths: Sequence[int], *, max_len: int, rows: int, tokens: int
) -> list[GridSize]:
    """Return the sizes of the grid that a step of a runner can have.

    Args:
        prompts: the numbers of prompts to capture.
        lengths: the tokens per prompt to capture.
        max_len: the largest of `lengths` to capture.
        rows: the number of sequences that can run.
        tokens: the number of tokens that a step can have, padding included.
    """
    lengths = [length for length in lengths if length <= max_len]
    return sorted({(n, length) for n in prompts for length in lengths if n <= rows and n * length <= tokens})


def resolve_grid(
    config: EngineConfig,
    resolved: ResolvedConfig,
    backend: AttentionBackend,
    name: str,
    moe: bool,
    *,
    captures: bool,
) -> list[GridSize]:
    """Return the sizes of the grid.

    There are none if the option is off, or if the grid cannot be used; in the second case a warning says why.

    Args:
        config: the options of the user.
        resolved: the sizes that limit a step.
        backend: the attention backend, which must support the grid.
        name: the name of the backend, for the warning.
        moe: whether the model has experts.
        captures: whether this runner captures graphs at all.
    """
    if not config.enable_batch_prefill_cuda_graph:
        return []
    sizes = grid_sizes(
        parse_sizes(config.batch_prefill_batch_sizes, "batch_prefill_batch_sizes"),
        parse_sizes(config.batch_prefill_seq_lengths, "batch_prefill_seq_lengths"),
        max_len=config.batch_prefill_max_seq_len,
        rows=resolved.max_running_requests,
        tokens=resolved.max_running_requests + resolved.chunked_prefill_size,
    )
    if resolved.device.type == "cpu":
        why = "it has no effect on a CPU, which has no CUDA graphs; leave the option out, or use a GPU"
    elif moe:
        why = (
            "a mixture of experts needs all padding behind the last token, and here every prompt is padded "
            "at its front; leave the option out"
        )
    elif not backend.supports_batch_prefill_cuda_graph():
        why = (
            f"attention backend {name!r} does not support it; choose one that does with --attention-backend, "
            "or leave the option out"
        )
    elif not captures:
        why = "no CUDA graphs are captured"
    elif not sizes:
        why = (
            "no size of --batch-prefill-batch-sizes and --batch-prefill-seq-lengths fits "
            f"{resolved.max_running_requests} requests, {resolved.chunked_prefill_size} prompt tokens per "
            f"step and --batch-prefill-max-seq-len {config.batch_prefill_max_seq_len}"
        )
    else:
        return sizes
    logger.warning("--enable-batch-prefill-cuda-graph is ignored: %s", why)
    return []


def _shape(size: GridSize) -> StepShape:
    """Return the shape of a step of one grid size. The backend makes its query blocks, so it has none."""
    count, length = size
    return StepShape(
        tokens=count * length, decode=0, sequences=count, blocks=0, logits=count, prompt_len=length
    )
