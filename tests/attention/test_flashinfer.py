"""The plans and launches of FlashInfer, with a reference for its functions; GPU tests use the real ones."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from segue.attention import flashinfer, registry
from segue.attention.base import AttentionShape
from segue.attention.flashinfer import FlashInferAttention
from tests.attention.case import Case
from tests.attention.static import Static
from tests.support.fake_flashinfer import FakeFlashInfer, installed


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlashInfer]:
    monkeypatch.setattr(flashinfer, "_WORKSPACE", 1 << 20)  # too small for the splits of some steps here
    fake = FakeFlashInfer()
    with installed(fake):
        yield fake


STEPS = [
    ([1, 1, 1], [5, 70, 16], 3),
    ([7, 20], [7, 90], 0),
    ([1, 1, 7, 1], [5, 70, 30, 1], 2),
    ([5, 4], [3, 0], 0),
    ([1, 300], [200, 300], 1),
]


@pytest.mark.parametrize(("q_lens", "kv_lens", "num_decode"), STEPS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_step_agrees_with_the_oracle(
    q_lens: list[int], kv_lens: list[int], num_decode: int, page_size: int
) -> None:
    Case(q_lens, kv_lens, num_decode, page_size=page_size, make=FlashInferAttention).check()


@pytest.mark.parametrize("slots", [4, 20])
def test_padded_steps_of_any_mix_agree_with_the_oracle(slots: int, fake: FakeFlashInfer) -> None:
    case = Case([1, 1, 1, 12, 30], [9, 40, 1, 50, 30], 3, make=FlashInferAttention)
    static = Static(case, slots=slots, tokens=50)
    for members, num_decode in (([0, 1, 3], 2), ([0, 1, 2], 3), ([4, 3], 0), ([2, 4], 1)):
        static.load(members, num_decode)
        static.check(members)
    assert set(fake.splits) == {(slots, slots + 1), (50, slots + 2)}, "a graph holds one shape for each half"


def test_each_half_has_the_pages_of_its_own_sequences(fake: FakeFlashInfer) -> None:
    case = Case([1, 1, 12], [9, 40, 50], 2, make=FlashInferAttention)
    case.check()
    assert fake.launched == [True, False], "prefill writes zeros to the decode rows, so it comes first"
    assert fake.plans[False] == {"starts": [0, 0, 1, 2], "pages": [0, 0, 1, 4], "page_size": 16}
    assert fake.plans[True] == {"starts": [0, 0, 2, 2, 14], "pages": [4, 4, 4, 4, 8], "page_size": 16}


@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_a_half_that_another_backend_serves_is_not_planned(half: str, fake: FakeFlashInfer) -> None:
    case = Case([1, 1, 12], [9, 40, 50], 2, make=FlashInferAttention)
    setattr(case.ctx.backend, f"serves_{half}", False)
    case.ctx.backend.prepare(case.ctx)
    assert set(fake.plans) == {half == "decode"}, "the key is whether it is causal, as prefill is"


def test_a_step_that_is_captured_without_lengths_has_no_work_and_is_planned_once(
    fake: FakeFlashInfer,
) -> None:
    static = Static(Case([1, 12], [9, 50], 1, make=FlashInferAttention), slots=3, tokens=20)
    for view in ("slots_device", "kv_lens_device", "cu_seqlens_q_device"):
        getattr(static.ctx, view).zero_()
    static.run()
    assert {each for plan in fake.plans.values() for each in (*plan["starts"], *plan["pages"])} == {0}
    fake.plan = None  # type: ignore[method-assign,assignment]
    backend = static.backend
    for half in (backend._decode, backend._prefill):
        half.module = SimpleNamespace(plan=None, paged_run=fake.paged_run)
    static.run()


def test_keys_are_split_where_the_partial_results_have_room(fake: FakeFlashInfer) -> None:
    small, large = (Case([q], [q], 0, kv_heads=1, head_dim=64, make=FlashInferAttention) for q in (20, 1000))
    small.run()
    large.run()
    assert fake.splits == {(20, 2): True, (1000, 2): False}


def test_only_a_step_of_decode_alone_starts_before_the_kernel_before_it_has_ended(
    fake: FakeFlashInfer,
) -> None:
    for q_lens, num_decode in (([1, 1], 2), ([1, 4], 1), ([3, 4], 0)):
        case = Case(q_lens, [9, 9], num_decode, make=FlashInferAttention)
        case.ctx.backend._has_pdl = True  # type: ignore[attr-defined]
        case.run()
    assert fake.pdl == [True, False, False, False]


def test_sequences_that_only_the_device_has_are_empty() -> None:
    case = Case([3, 12], [9, 50], 0, make=FlashInferAttention)
    ctx = case.ctx
    case.ctx = replace(
        ctx,
        slots_device=F.pad(ctx.slots_device, (0, 3)),
        kv_lens_device=F.pad(ctx.kv_lens_device, (0, 3), value=1),
        cu_seqlens_q_device=F.pad(ctx.cu_seqlens_q_device, (0, 3), value=15),
    )
    case.check()


def test_it_tells_that_a_kernel_is_compiled(fake: FakeFlashInfer, caplog: pytest.LogCaptureFixture) -> None:
    for fake.is_compiled in (True, False):
        with caplog.at_level("INFO", logger="segue"):
            Case([1], [1], 1, make=FlashInferAttention)
        assert ("nvcc compiles" in caplog.text) is not fake.is_compiled


def test_a_plan_that_is_staged_again_waits_for_its_copies(
    fake: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    event = SimpleNamespace(synchronize=lambda: waits.append("wait"), record=lambda: waits.append("copy"))
    case = Case([1], [5], 1, make=FlashInferAttention)
    backend: Any = case.ctx.backend
    for staged in backend._staged:
        staged.copied = event
    case.run()
    assert waits == ["wait", "copy"]
    staged = [backend._staged[0] for _ in range(4) if case.run() is not None]
    assert len({id(each) for each in staged}) == 4, "four steps may be in flight"


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Any]:
    """The parts of FlashInfer that say what it needs; nvcc is in `tmp_path`."""
    found = {
        "flashinfer": {"__version__": "0.6.15.post1"},
        "flashinfer.jit": {},
        "flashinfer.jit.cpp_ext": {"get_cuda_path": lambda: str(tmp_path)},
        "flashinfer.jit.env": {"has_flashinfer_jit_cache": lambda: False},
    }
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "ninja"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    with pytest.MonkeyPatch.context() as patch:
        for name, members in found.items():
            module = ModuleType(name)
            vars(module).update(members)
            patch.setitem(sys.modules, name, module)
        patch.setenv("PATH", str(tmp_path / "bin"))
        yield sys.modules


def test_it_says_what_it_lacks(package: Any, tmp_path: Path) -> None:
    assert flashinfer.why_not() == ""
    (tmp_path / "bin" / "ninja").unlink()
    assert "ninja, which is not in PATH" in flashinfer.why_not()
    (tmp_path / "bin" / "nvcc").unlink()
    assert "no nvcc in CUDA_HOME" in flashinfer.why_not()
    package["flashinfer.jit.env"].has_flashinfer_jit_cache = lambda: True
    assert flashinfer.why_not() == ""
    package["flashinfer"].__version__ = "0.7.4"
    assert "flashinfer-python 0.7.4 is installed" in flashinfer.why_not()
    assert "install 'segue[flashinfer]'" in flashinfer.why_not()
    del (
        package["flashinfer.jit.env"].has_flashinfer_jit_cache,
        package["flashinfer.jit.cpp_ext"].get_cuda_path,
    )
    assert "flashinfer-python 0.7.4 is installed" in flashinfer.why_not(), "it may have other functions"


def test_no_cuda_toolkit_is_no_nvcc(package: Any) -> None:
    def missing() -> str:
        raise RuntimeError("no CUDA")

    package["flashinfer.jit.cpp_ext"].get_cuda_path = missing
    assert "no nvcc" in flashinfer.why_not()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"head_dim": 96}, "head size 96"),
        ({"deterministic": True}, "its bits depend on the batch"),
        ({"capability": (7, 5)}, r"compute capability \(7, 5\)"),
        (
            {"requests": 10_001},
            "10001 requests may run, but it takes at most 10000; lower --max-running-requests",
        ),
        ({}, ""),
    ],
)
def test_what_it_supports(
    package: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    given = {"dtype": torch.bfloat16, "head_dim": 128, "deterministic": False, "capability": (9, 0)}
    given |= {"requests": flashinfer.MOST_REQUESTS} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: given["capability"])
    setting = registry.Setting(
        shape=AttentionShape(num_heads=16, num_kv_heads=8, head_dim=given["head_dim"], scale=0.1),
        device=torch.device("cuda", 0),
        dtype=given["dtype"],
        page_size=64,
        deterministic=given["deterministic"],
        max_requests=given["requests"],
    )
    if reason:
        with pytest.raises(registry.ConfigError, match=f"'flashinfer' cannot be used: .*{reason}"):
            registry.select("flashinfer", setting)
    else:
        assert registry.select("flashinfer", setting).graphs
        assert registry.select("triton,flashinfer", setting).name == "triton,flashinfer"


def test_a_step_of_the_most_requests_has_room_for_its_lengths() -> None:
    most = flashinfer.MOST_REQUESTS
    shape = flashinfer._Shape(max_decode=most, sequences=most, tokens=2 * most, has_prefill=True)
    assert flashinfer._Lengths.end(shape) <= flashinfer._LENGTHS


def test_auto_does_not_take_it_before_it_was_measured(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for head_dim in (64, 128, 256):
        shape = AttentionShape(num_heads=16, num_kv_heads=8, head_dim=head_dim, scale=0.1)
        setting = registry.Setting(
            shape=shape, device=torch.device("cuda", 0), dtype=torch.bfloat16, page_size=64
        )
        assert "flashinfer" not in registry.select("auto", setting).name
