"""The counter of kernels that are compiled behind the start, with a stand-in for Triton."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from segue.kernels import compilations
from segue.kernels.compilations import Compilations, describe, watched

CUDA = torch.device("cuda")


class Triton:
    """The part of Triton that tells of compiled kernels."""

    def __init__(self) -> None:
        self.compilation = SimpleNamespace(listener=None)

    def compile(self, name: str = "_scatter", *, cache_hit: bool = False) -> None:
        if self.compilation.listener is not None:
            self.compilation.listener(
                src=source(name),
                metadata={},
                metadata_group={},
                times=SimpleNamespace(total=1_250_000),  # microseconds
                cache_hit=cache_hit,
            )


def source(name: str) -> Any:
    """A variant, in the form of Triton's `ASTSource`."""
    return SimpleNamespace(
        fn=SimpleNamespace(__name__=name),
        signature={"out": "*bf16", "count": "i32", "bias": "constexpr", "PDL": "constexpr"},
        constants={(2,): None, (3,): 2},
        attrs={(0,): [["tt.divisibility", 16]]},
    )


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    knobs = Triton()
    module = ModuleType("triton")
    module.knobs = knobs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", module)
    return knobs


def test_kernels_are_counted_while_they_are_watched_and_named_in_a_warning(
    triton: Triton, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, int]] = []
    triton.compile()
    with watched(CUDA, lambda found: told.append((found.compiled, found.loaded))):
        assert not told and not caplog.messages
        triton.compile("attend")
        triton.compile("decode", cache_hit=True)
        triton.compile("_gemm")
    triton.compile()
    assert told == [(1, 0), (1, 1), (2, 1)]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    first, second, _ = caplog.messages
    assert "attend was compiled after the start, which took 1.25 s" in first
    assert first.endswith("out: *bf16, divisible by 16; count: i32; bias: None; PDL: 2")
    assert "decode was loaded from the cache on disk after the start" in second


def test_engines_of_one_process_count_for_themselves(triton: Triton) -> None:
    counts = [Compilations(), Compilations()]

    def take(index: int, found: Compilations) -> None:
        counts[index].compiled = found.compiled

    first = watched(CUDA, lambda found: take(0, found))
    second = watched(CUDA, lambda found: take(1, found))
    first.__enter__()
    second.__enter__()
    triton.compile()
    first.__exit__(None, None, None)
    triton.compile()
    second.__exit__(None, None, None)
    triton.compile()
    assert [each.compiled for each in counts] == [1, 2]


def test_on_a_cpu_nothing_is_watched_and_triton_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import would fail
    with watched(torch.device("cpu"), lambda found: pytest.fail("a CPU compiles nothing")):
        pass


def test_undefined_tensors_of_the_thread_that_compiles_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def sevens(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: make(*args, **options).fill_(7)

    for owner, name in compilations._UNDEFINED:
        monkeypatch.setattr(owner, name, sevens(getattr(owner, name)))
    made = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def values() -> list[list[int]]:
        ones = torch.ones(2, dtype=torch.int64)
        tensors = torch.empty(2, dtype=torch.int64), torch.empty_like(ones), ones.new_empty(2)
        return [tensor.tolist() for tensor in tensors]

    others: list[list[int]] = []
    with compilations._zeros():
        assert values() == [[0, 0]] * 3
        thread = threading.Thread(target=lambda: others.extend(values()))
        thread.start()
        thread.join()
    assert others == [[7, 7]] * 3
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == made


def test_threads_that_compile_together_lose_no_count() -> None:
    found = Compilations()

    def note() -> None:
        for _ in range(2000):
            found.note(is_loaded=False)
            found.note(is_loaded=True)

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found.compiled, found.loaded) == (8000, 8000)


def test_a_variant_is_described_by_types_and_constants() -> None:
    assert describe(source("any")) == "out: *bf16, divisible by 16; count: i32; bias: None; PDL: 2"


@pytest.mark.parametrize(
    ("cores", "free", "ranks", "expected"),
    [
        (64, 64 << 30, 1, 16),
        (6, 64 << 30, 2, 3),
        (64, 4 << 30, 2, 4),
        (64, 1 << 29, 1, None),
        (1, 1 << 40, 1, None),
    ],
)
def test_as_many_processes_compile_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, free: int, ranks: int, expected: int | None
) -> None:
    forked: list[int] = []
    closed: list[int] = []

    def fork(count: int) -> Any:
        forked.append(count)
        return SimpleNamespace(close=lambda: closed.append(count), count=count)

    monkeypatch.setattr(compilations.CompileProcesses, "fork", fork)
    monkeypatch.setattr(compilations, "can_compile", lambda: True)
    monkeypatch.setattr(compilations, "free_cpu_memory", lambda: free)
    monkeypatch.setattr(compilations, "usable_cores", lambda: cores)
    compilations.start_processes(ranks)
    assert forked == ([] if expected is None else [expected])
    assert compilations.most_at_once() == (expected or min(16, cores))
    compilations.end_processes()
    compilations.end_processes()
    assert closed == forked


def test_where_no_process_can_be_forked_threads_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(count: int) -> Any:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(compilations.CompileProcesses, "fork", fork)
    monkeypatch.setattr(compilations, "can_compile", lambda: True)
    monkeypatch.setattr(compilations, "usable_cores", lambda: 2)
    compilations.start_processes(1)
    assert compilations._processes is None


def test_without_a_gpu_no_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "can_compile", lambda: False)
    monkeypatch.setattr(compilations.CompileProcesses, "fork", lambda _: pytest.fail("nothing compiles"))
    compilations.start_processes(1)
