"""``segue compile``: fills Triton's cache on disk with a model's kernels, for later starts and for images."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from segue.cli.flags import with_options
from segue.cli.start_view import start_view
from segue.config import SERVER_GROUPS, EngineConfig
from segue.errors import ConfigError
from segue.logs import configure

if TYPE_CHECKING:
    from segue.messages.control import InitStep, StartStep

KERNELS = "kernels"  # the step of the start that compiles


@with_options(EngineConfig, without=SERVER_GROUPS)
def compile_kernels(
    config: EngineConfig,
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model of segue serve.", show_default=False)
    ] = None,
) -> None:
    """Compile the kernels of a model for this machine's GPU, into Triton's cache on disk, and end.

    A later start with the same options loads them. It takes the options of `segue serve`, of which the
    model, --tp, --dtype and the sizes matter. No weights are read. TRITON_CACHE_DIR names the directory.
    """
    configure(config.log_level, config.log_format)
    out = Console(highlight=False)
    if config.device == "cpu":
        from segue.kernels.cpu.build import kernels

        why_not = kernels().why_not  # which compiles them, if they are not there yet
        text = f"Nothing to compile: {why_not}." if why_not else "The kernels of the CPU are compiled."
        out.print(text, soft_wrap=True)
        return
    check_device()
    config = replace(config, model=name or config.model, load_format="dummy")
    with start_view(config.log_format) as on_start:
        steps = asyncio.run(_start(config, on_start))
    seconds = sum(step.seconds for step in steps)
    [found] = [step.detail for step in steps if step.name == KERNELS]
    from triton import knobs

    out.print(
        f"Kernels: {found}, in a start of {seconds:.1f} s. The cache is {knobs.cache.dir}", soft_wrap=True
    )


def check_device() -> None:
    """Check that kernels can be compiled here.

    Raises:
        ConfigError: Triton or the device is missing.
    """
    import torch

    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "kernels are compiled by Triton, which is not installed: it comes with torch's builds for CUDA. "
            "Install one of these; --device cpu compiles those of the CPU",
            param="device",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no CUDA device, and kernels are compiled for the device at hand, whose tiles were "
            "measured: run segue compile on a machine with the GPU that will serve, with TRITON_CACHE_DIR in "
            "a directory that is kept; --device cpu compiles those of the CPU",
            param="device",
        )


async def _start(config: EngineConfig, on_start: Callable[[StartStep | None], None] | None) -> list[InitStep]:
    """Start an engine and end it; returns the steps of its start."""
    from segue.launch.runtime import Runtime

    runtime = await Runtime.start(config, on_start=on_start)
    try:
        return runtime.manager.ready.init_steps
    finally:
        await runtime.shutdown()
