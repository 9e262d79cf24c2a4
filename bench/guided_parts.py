"""Where the time of a guided step goes, part by part: on the host, and on the GPU with an idle engine.

A step of 64 rows is one forward pass, then sampling. While the forward pass runs, the tokens of the step
before are consumed and the next masks computed. So only these parts make a step longer: what the masks add to
sampling, and what consuming and masks take beyond the forward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from segue.api.guided import guided_options
from segue.api.native import NativeSampling
from segue.guided.beginning import LIMITS
from segue.guided.follower import Follower, Guide
from segue.guided.grammars import to_llguidance
from segue.guided.processes import ProcessMatchers
from segue.messages.guided import GuidedVocabulary
from segue.messages.requests import SamplingParams
from segue.model_runner.mask_table import MaskTable

REPEATS = 40
PAUSE_S = 0.001  # between two repetitions, as between two steps: idle threads fall asleep


def host_ms(tokenizer: LLTokenizer, schema: dict[str, Any], batch: int, size: int) -> dict[str, float]:
    """Return the median milliseconds of the parts on the host, for so many rows of a vocabulary."""
    spec = guided_options(NativeSampling(json_schema=schema), {})["grammar"]
    matcher = LLMatcher(tokenizer, to_llguidance(spec), log_level=0, limits=LIMITS)
    rng = np.random.default_rng(0)
    masks = np.zeros((batch, (size + 31) // 32), dtype=np.int32)
    for _ in range(8):  # into the first string
        matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.strides[0])
        matcher.consume_token(int(rng.choice(_allowed(masks[0], size))))
    matchers = [matcher.deep_copy() for _ in range(batch)]
    found = {}
    for threads in (0, 1, 2, 4):
        executor = LLExecutor(threads) if threads else None
        follower = Follower(masks, executor)
        guides = [Guide(row, masks[row], late_eos=False, matcher=each) for row, each in enumerate(matchers)]
        consumed, computed = list[float](), list[float]()
        for _ in range(REPEATS):
            follower.fill(guides)
            tokens = [int(rng.choice(_allowed(masks[row], size))) for row in range(batch)]
            time.sleep(PAUSE_S)
            stamps = [time.perf_counter()]
            follower.consume(list(enumerate(guides)), tokens)
            stamps.append(time.perf_counter())
            follower.fill(guides)
            stamps.append(time.perf_counter())
            consumed.append(stamps[1] - stamps[0])
            computed.append(stamps[2] - stamps[1])
        found[f"masks, {threads or 'no'} threads of llguidance"] = _ms(computed)
        found["consume"] = _ms(consumed)
    return found


def processes_ms(vocabulary: GuidedVocabulary, schema: dict[str, Any], batch: int) -> dict[str, float]:
    """Return the median milliseconds of the phases of a step, without an engine, by the number of processes.

    The caller sees the two waits: until the tokens are consumed, and until the masks are there.
    """
    size = len(vocabulary.tokens)
    spec = guided_options(NativeSampling(json_schema=schema), {})["grammar"]
    params = SamplingParams(max_new_tokens=1, grammar=spec)
    rng, slots, found = np.random.default_rng(0), np.arange(batch), {}
    for count in (1, 2, 4, 6):
        table = MaskTable(batch, size, torch.device("cpu"), shared=True)
        assert table.descriptor is not None
        matchers = ProcessMatchers(table.host, table.descriptor, count)
        matchers.set_vocabulary(vocabulary)
        for slot in range(batch):
            matchers.put(slot, params, ())
        waits: dict[str, list[float]] = {"until consumed": [], "until masks": []}
        for step in range(8 + REPEATS):  # the first ones lead into a string
            matchers.wait(slots)
            # What all rows allow, so that it takes less than the time after which processes sleep.
            allowed = _allowed(np.bitwise_and.reduce(table.host), size)
            tokens = rng.choice(allowed, batch if step >= 8 else 1).repeat(1 if step >= 8 else batch).tolist()
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            taken = matchers.take(slots, partial(list, tokens))
            assert taken is not None
            taken.result()
            consumed = time.perf_counter()
            matchers.wait(slots)
            if step >= 8:
                waits["until consumed"].append(consumed - began)
                waits["until masks"].append(time.perf_counter() - began)
        phases = matchers.median_ms()
        each = {name: _ms(seconds) for name, seconds in waits.items()}
        each |= {name: phases[name] for name in ("consume", "masks")}  # by the clock of the slowest process
        found |= {f"{name}, {count} processes": ms for name, ms in each.items()}
        matchers.close()
        table.close()
    return found


def gpu_ms(batch: int, size: int) -> dict[str, float]:
    """Return the median milliseconds of the parts on the GPU."""
    from segue.kernels.triton.sampling import sample_plain
    from segue.memory.backing import to_device
    from segue.sampling.token_mask import forbid

    words = (size + 31) // 32
    torch.manual_seed(0)
    logits = torch.randn(batch, size, device="cuda")
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    most = torch.full((batch, words), -1, dtype=torch.int32, device="cuda")
    most[:, 0] = 0
    few = torch.zeros_like(most)
    few[:, 0] = -1
    staged = torch.full((batch, words), -1, dtype=torch.int32).pin_memory()
    columns: dict[str, Any] = {
        "inverse_temperatures": torch.ones(batch, device="cuda"),
        "seeds": torch.arange(batch, device="cuda"),
        "num_top": torch.full((batch,), -1, device="cuda"),
        "ring": torch.zeros((1, batch), dtype=torch.int32, device="cuda"),
        "logprob_ring": torch.zeros((1, batch), device="cuda"),
        "ring_index": torch.zeros(1, dtype=torch.int32, device="cuda"),
        "filters": (
            torch.zeros(batch, dtype=torch.int64, device="cuda"),
            torch.ones(batch, device="cuda"),
            torch.zeros(batch, device="cuda"),
        ),
    }
    guided = torch.ones(batch, dtype=torch.int64, device="cuda")

    def sample(masks: torch.Tensor | None) -> None:
        with_masks = None if masks is None else (masks, guided)
        sample_plain(logits, slots, slots, **columns, masks=with_masks)

    pinned = list[float]()
    for _ in range(REPEATS):  # as a step did when its masks were copied
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        to_device(np.stack([*staged.numpy()]), logits.device)
        pinned.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return {
        "stacking, pinning and copying the masks, on the host": _ms(pinned),
        "sampling": _gpu_ms(lambda: sample(None)),
        "sampling with masks in memory of the host": _gpu_ms(lambda: sample(staged)),
        "sampling with masks on the device": _gpu_ms(lambda: sample(most)),
        "sampling with masks on the device, of 32 tokens each": _gpu_ms(lambda: sample(few)),
        "upload of the masks alone": _gpu_ms(lambda: most.copy_(staged, non_blocking=True)),
        "masks by torch's operators": _gpu_ms(lambda: forbid(logits, slots.long(), few)),
    }


def _gpu_ms(work: Callable[[], object]) -> float:
    """Return the median milliseconds of work in a CUDA graph."""
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(10):
            work()
        graph.capture_end()
        found = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 10)
    return round(statistics.median(found), 4)


def _allowed(mask: np.ndarray[Any, np.dtype[np.int32]], size: int) -> np.ndarray[Any, Any]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])


def _ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)
