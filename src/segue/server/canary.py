"""Sends an engine the test request, which shows that it generates, and generates what it should."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from pathlib import Path

from segue.config import HealthStatus
from segue.errors import EngineHungError, OverloadedError, PausedError, SegueError, WakeError
from segue.failover import canary
from segue.failover.canary import NUM_OUTPUT_TOKENS, CanaryNote
from segue.frontend.request import MAX_PRIORITY, GenerateRequest
from segue.frontend.sampling_options import SamplingOptions
from segue.launch.runtime import Runtime
from segue.logs import logger


async def generate(runtime: Runtime) -> CanaryNote:
    """Returns what the engine makes of the test request. It goes ahead of the queue, and past the cache.

    Raises:
        SegueError: the engine cannot generate.
    """
    num_tokens = 1 if runtime.manager.role == "prefill" else NUM_OUTPUT_TOKENS  # it makes no more alone
    request = GenerateRequest(
        rid=f"canary-{uuid.uuid4().hex}",
        prompt=canary.prompt(runtime.manager.ready.vocab_size),
        options=SamplingOptions(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0),
        priority=MAX_PRIORITY,
        shares_kv=False,  # it shows what the device computes, and leaves no pages behind
    )
    with await runtime.manager.submit([request], is_canary=True) as call:
        (output,) = await call.outputs()
    logprobs = [entry.logprob for entry in output.logprobs]
    is_whole = len(output.token_ids) == len(logprobs) == num_tokens
    if not is_whole or not all(map(math.isfinite, logprobs)):
        found = f"tokens {output.token_ids} with logprobs {logprobs}"
        raise WakeError(f"the test request gave {found}; {num_tokens} finite ones were expected")
    return CanaryNote(output.token_ids, logprobs)


async def check(runtime: Runtime, directory: Path) -> None:
    """Generate the test request, and compare it with the note of the cohort.

    Raises:
        SegueError: the engine cannot generate, or generates something else than its predecessors.
    """
    began = time.monotonic()
    found = await generate(runtime)
    path = canary.path_of(directory, runtime.config.cohort, facts_of(runtime))
    expected = canary.read(path)
    if expected is None:
        canary.write(path, found)
    elif text := canary.difference(expected, found, is_exact=runtime.config.deterministic):
        raise WakeError(
            f"the test request gave {found}, unlike on the engine before: {text}. This engine's memory or "
            f"device may be damaged; if all engines say so, delete {path}"
        )
    logger.info("the test request took %.0f ms", (time.monotonic() - began) * 1e3)


def facts_of(runtime: Runtime) -> list[object]:
    """Returns what engines must have in common to generate the same."""
    config, ready, source = runtime.config, runtime.manager.ready, runtime.source
    files = [source.gguf] if source.gguf is not None else sorted(source.directory.glob("*.safetensors"))
    weights = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    drawn = config.seed if source.format == "dummy" else None
    return [
        *(source.directory, source.format, source.config, weights, drawn),
        *(runtime.manager.weights.version, runtime.manager.weights.generation),
        *(
            ready.device.partition(":")[0],
            ready.dtype,
            config.kv_cache_dtype != "auto",
            ready.attention_backend,
            config.tp,
            config.deterministic,
        ),
        runtime.manager.role == "prefill",
    ]


def may_generate(runtime: Runtime) -> bool:
    """Whether nothing that others have asked for keeps the engine from generating."""
    manager, trouble = runtime.manager, runtime.trouble
    is_free = manager.stats.counters.paused is None and manager.weights.state == "idle"
    return is_free and (trouble is None or isinstance(trouble, EngineHungError))


async def status(runtime: Runtime) -> HealthStatus:
    """Generate the test request on an engine that serves; returns whether its endpoint is ready by that."""
    try:
        await asyncio.wait_for(generate(runtime), runtime.config.stall_s)
    except (OverloadedError, PausedError):
        return "ready"  # it has other work, or was paused meanwhile
    except (SegueError, TimeoutError) as error:
        if not may_generate(runtime):
            return "ready"  # it was paused meanwhile, for instance; `Life` knows all else that may be wrong
        logger.error(
            "the health check failed: %s", str(error) or f"no answer in {runtime.config.stall_s:g} s"
        )
        return "notready"
    return "ready"
