"""The accuracy of the engine's numbers: compared with transformers, and with the reference of SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import segue
from segue.checkpoint import bundled
from segue.checkpoint.gguf import weights as gguf_weights
from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from tests.e2e.teacher import Verdict, greedy, judge
from tests.e2e.test_correctness import LOGPROB_TOLERANCE, TIGHT, WITH_LOGPROBS, Setup
from tests.fixtures import reference
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BAR = 1.5  # the largest error allowed, as a multiple of that of transformers in the same dtype
STARTS = [1, 2, 3, 7, 15, 16, 17, 31, 40, 63, 64, 65, 80, 99]  # lengths of prompts, prefixes of one text
LONG = 1100  # the length of a prompt for kernels with large tiles
DECODED = 28  # tokens after each prompt
QWEN3_0_6B: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "initializer_range": 0.04,
}


def bundled_model() -> Path:
    """Return the bundled model's file; skip if it is not cached, as a machine with a GPU may be offline."""
    gguf = Path(EngineConfig.create().cache_dir) / "bundled" / bundled.FILE
    if not gguf.exists():
        pytest.skip(f"{gguf} does not exist: python -m segue.checkpoint.bundled fetches it")
    return gguf


def _smollm2(directory: Path) -> Any:
    gguf = bundled_model()
    source = resolve(str(gguf), "auto", EngineConfig.create().cache_dir)
    converted = source.directory
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(converted))
    found = model.load_state_dict(
        load_file(gguf_weights.convert(gguf, converted, source.config, torch.float32)), strict=False
    )
    assert found.missing_keys in ([], ["lm_head.weight"]) and not found.unexpected_keys
    model.tie_weights()
    return model


def _qwen3_layers(directory: Path) -> Any:
    """Return a few layers of Qwen3-0.6B, for which stored GEMM plans exist."""
    torch.manual_seed(3)
    with torch.device("cuda"):
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3_0_6B))


MODELS = {
    "tiny-llama": tiny.save_llama,
    "tiny-qwen3": tiny.save_qwen3,
    "qwen3-0.6b-layers": _qwen3_layers,
    "smollm2": _smollm2,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with weights that are exact in bfloat16, random norms, and the ids of a text."""

    directory: Path
    ids: list[int]
    starts: list[int]

    @torch.inference_mode()
    def true_logits(self, dtype: torch.dtype) -> Tensor:
        """Return the logits of transformers in `dtype`, as float32 `[T, V]`."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype=dtype).cuda().eval()
        logits: Tensor = model(torch.tensor([self.ids], device="cuda")).logits[0].float()
        return logits


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](directory).requires_grad_(False)
    is_tiny, is_real = request.param.startswith("tiny"), request.param == "smollm2"
    starts = STARTS if is_tiny else [*STARTS, LONG]
    count = starts[-1] + DECODED
    if is_real:
        ids = [
            token
            for name in ("story", "harbour-price", "code")
            for token in reference.load().case(name).prompt_ids
        ]
    else:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()
        torch.manual_seed(4)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.bfloat16().save_pretrained(directory)
    return Checkpoint(directory, ids[:count], starts)


@dataclass
class Spy:
    """Copies the logits of every sampling row, in captured graphs too."""

    logits: Tensor | None = None

    def watch(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        from segue.model_runner import cuda_executor

        sample_plain = cuda_executor.sample_plain

        def sample(logits: Tensor, *where: Any, **options: Any) -> None:
            if self.logits is None:
                self.logits = logits.new_empty(rows, logits.shape[1])
            self.logits[: len(logits)].copy_(logits)
            sample_plain(logits, *where, **options)

        monkeypatch.setattr(cuda_executor, "sample_plain", sample)


def our_logits(
    checkpoint: Checkpoint, dtype: str, spy: Spy, backend: str
) -> tuple[Tensor, Tensor, list[str | None]]:
    """Run each prompt, then force it to continue with the text.

    Returns the float32 logits after each prompt, `[B, V]`, those after each forced token,
    `[B, DECODED, V]`, and why each step ran without a graph (None for most steps).
    """
    ids, count = checkpoint.ids, len(checkpoint.starts)
    runner = making.make_runner(
        checkpoint.directory,
        device="cuda",
        dtype=dtype,
        page_size=64,
        num_kv_tokens=2 * sum(checkpoint.starts) + count * 2 * 64,
        max_running_requests=count,
        chunked_prefill_size=2048,
        attention_backend=backend,
    )
    planner = Planner(runner)
    sequences = [planner.add(ids[:start]) for start in checkpoint.starts]
    prefill, decode, reasons = [], [], []
    for first in range(0, count, 4):  # ragged steps, in padded forward and sampling graphs
        group = sequences[first : first + 4]
        reasons.append(planner.run([(sequence, sequence.prompt_len) for sequence in group]).eager)
        prefill.append(spy.logits[: len(group)].clone())
    pool, slots = runner._executor.state.token_pool, [sequence.slot for sequence in sequences]
    for _ in range(DECODED):
        ends = [len(sequence.tokens) - 1 for sequence in sequences]
        forced = torch.tensor([ids[end] for end in ends], dtype=torch.int32, device="cuda")
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.tokens[end] = ids[end]
        runner.on_stream(partial(pool.__setitem__, (slots, ends), forced))
        reasons.append(planner.run([(sequence, 1) for sequence in sequences]).eager)
        decode.append(spy.logits[:count].clone())
    runner.close()
    return torch.cat(prefill), torch.stack(decode, 1), reasons


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
def test_logits_are_as_accurate_as_those_of_transformers(
    checkpoint: Checkpoint, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
        if checkpoint.directory.name.startswith("tiny"):
            pytest.skip("FlashInfer has no kernels for such small heads")
    spy = Spy()
    spy.watch(monkeypatch, len(checkpoint.starts))
    prefill, decode, reasons = our_logits(checkpoint, dtype, spy, backend)
    assert reasons.count(None) >= DECODED + 3 and {*reasons} <= {None, "tokens"}, reasons
    true, peer = (checkpoint.true_logits(kind) for kind in (torch.float32, getattr(torch, dtype)))
    positions = torch.tensor(checkpoint.starts, device="cuda")[:, None] + torch.arange(
        -1, DECODED, device="cuda"
    )
    errors, peers = (
        torch.cat([prefill[:, None], decode], 1) - true[positions],
        peer[positions] - true[positions],
    )
    ratios = {"max": (errors.abs().max() / peers.abs().max()).item()}
    for name, part in (("prefill", slice(1)), ("decode", slice(1, None))):
        ours, theirs = (each[:, part].double().square().mean().sqrt() for each in (errors, peers))
        ratios[name] = (ours / theirs).item()
    print("\nACCURACY", checkpoint.directory.name, dtype, backend, ratios, "of", peers.abs().max().item())
    assert max(ratios.values()) <= BAR, ratios


SETUPS = (
    Setup("graphs"),
    Setup("eager-no-overlap", {"disable_cuda_graph": True, "disable_overlap": True}),
    Setup("preempted", {"page_size": 64, "num_kv_tokens": TIGHT}, preempts=True),
    Setup("logprobs", {"max_running_requests": 8}, logprobs=True),
    Setup("no-prefix-cache", {"disable_prefix_cache": True}, caches=False),
)
MORE_SETUPS = (  # other page sizes: their kernels must be compiled first
    Setup(
        "page-1-chunk-16-no-prefix-cache",
        {"page_size": 1, "chunked_prefill_size": 16, "disable_prefix_cache": True},
        caches=False,
    ),
    Setup("page-16-preempted", {"page_size": 16, "num_kv_tokens": TIGHT}, preempts=True),
    Setup(
        "page-16-chunk-16-preempted-logprobs-eager",
        {"page_size": 16, "chunked_prefill_size": 16, "num_kv_tokens": TIGHT, "disable_cuda_graph": True},
        logprobs=True,
        preempts=True,
    ),
)


@pytest.fixture(
    scope="module",
    params=[*SETUPS, *(pytest.param(setup, marks=pytest.mark.slow) for setup in MORE_SETUPS)],
    ids=lambda setup: setup.name,
)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Setup, Any]]:
    """An engine that serves SmolLM2 in float32, for each setup."""
    setup: Setup = request.param
    bundled_model()
    options = {"num_kv_tokens": 20_000, "max_running_requests": 32, **setup.options}
    with segue.Engine(dtype="float32", device="cuda", embedded=True, **options) as engine:
        yield setup, engine


def test_smollm2_generates_the_tokens_of_the_reference(running: tuple[Setup, Any]) -> None:
    setup, engine = running
    cases = reference.load().cases
    verdict: Verdict = judge(engine, cases, **(WITH_LOGPROBS if setup.logprobs else {}))
    internal = engine.get_server_info()["internal_states"][0]
    print("\nSMOLLM2", setup.name, "excused:", verdict.excused or "none", "texts:", verdict.different_texts)
    assert verdict.wrong == []
    assert len(verdict.different_texts) <= 2, verdict.different_texts
    assert (internal["num_preemptions"] > 0) == setup.preempts
    if setup.logprobs:
        errors = [
            abs(ours[0] - theirs)
            for case, reply in zip(cases, verdict.first_round, strict=True)
            if reply["output_ids"] == case.output_ids
            for ours, theirs in zip(reply["meta_info"]["output_token_logprobs"], case.logprobs, strict=True)
        ]
        assert len(errors) > 0.9 * len(cases) * reference.NUM_TOKENS
        print("largest difference of logprobs", max(errors))
        assert max(errors) <= LOGPROB_TOLERANCE


def test_smollm2_reuses_cached_prefixes(running: tuple[Setup, Any]) -> None:
    setup, engine = running
    case = reference.load().case("story")
    replies = [engine.generate(input_ids=case.prompt_ids, sampling_params=greedy(8)) for _ in range(2)]
    assert replies[0]["output_ids"] == replies[1]["output_ids"] == case.output_ids[:8]
    assert (replies[1]["meta_info"]["cached_tokens"] > 0) == setup.caches
