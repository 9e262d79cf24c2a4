"""A reference for the functions of FlashInfer that the attention backend calls; the package is not needed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.oracle import attend

CAUSAL = 1
MODULES = ("flashinfer", "flashinfer.prefill", "flashinfer.jit", "flashinfer.jit.attention")


class FakeFlashInfer:
    """FlashInfer's functions `plan` and `paged_run`: one sequence at a time, over what the device has.

    `plans` has the arguments of the last plan of each half, by whether it is causal.
    """

    def __init__(self) -> None:
        self.plans: dict[bool, dict[str, Any]] = {}
        self.splits: dict[tuple[int, int], bool] = {}  # by tokens and sequences
        self.launched: list[bool] = []
        self.is_compiled = True
        self.pdl: list[bool] = []

    def plan(self, workspace: Tensor, buffer: Tensor, staged: Tensor, *given: Any) -> list[int]:
        starts, pages, _, tokens, count, *_, page_size, for_graphs = given[:9]
        dim, dim_too, causal, window, fixed_size, no_splits, others = given[9:]
        assert for_graphs and dim == dim_too and (window, fixed_size, others) == (-1, -1, 0)
        assert workspace.dtype == buffer.dtype == staged.dtype == torch.uint8
        assert starts.dtype == pages.dtype == torch.int32 and len(starts) == len(pages) == count + 1
        # Outputs are written from the first row on, and programs without work have the first sequence.
        assert starts[:2].tolist() == [0, 0] and pages[0] == pages[1]
        assert (starts.diff() >= 0).all() and (pages.diff() >= 0).all()
        assert starts[-1] <= tokens and not staged[:12].any()
        assert self.splits.setdefault((tokens, count), not no_splits) == (not no_splits)
        staged[:12].fill_(7)  # the next plan here finds what this one leaves
        self.plans[causal] = {"starts": starts.tolist(), "pages": pages.tolist(), "page_size": page_size}
        return [tokens, count, causal]

    def paged_run(self, *, q: Tensor, o: Tensor, qo_indptr: Tensor, plan_info_vec: Any, **given: Any) -> None:
        planned = self.plans[given["mask_mode"] == CAUSAL]
        starts, pages = qo_indptr.tolist(), given["paged_kv_indptr"].tolist()
        assert (starts, pages) == (planned["starts"], planned["pages"]), "the plan is of another step"
        assert plan_info_vec[1:] == [len(starts) - 1, given["mask_mode"] == CAUSAL]
        assert (given["layout"], given["window_left"]) == (0, -1)
        self.pdl.append(given["enable_pdl"])
        keys, values = given["paged_k_cache"], given["paged_v_cache"]
        for i, last in enumerate(given["paged_kv_last_page_len"].tolist()):
            used = given["paged_kv_indices"][pages[i] : pages[i + 1]].long()
            length = (len(used) - 1) * planned["page_size"] + last if len(used) else 0
            queries = slice(starts[i], starts[i + 1])
            found = [cache[used].flatten(0, 1)[:length] for cache in (keys, values)]
            o[queries] = attend(q[queries], *found, given["sm_scale"]).to(o.dtype)
        self.launched.append(given["mask_mode"] == CAUSAL)


@contextmanager
def installed(functions: Any) -> Iterator[None]:
    """Let a backend that is made in the block have the functions of a `FakeFlashInfer`, or others."""
    module: Any = ModuleType("flashinfer")
    module.get_batch_prefill_module = lambda *_: functions
    module.gen_batch_prefill_module = lambda *_: SimpleNamespace(
        is_compiled=getattr(functions, "is_compiled", True)
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            patch.setitem(sys.modules, name, module)
        yield
