import ast
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from segue.attention import registry
from segue.attention.base import AttentionShape
from segue.attention.registry import (
    BackendEntry,
    Capabilities,
    Setting,
    names,
    select,
    unsupported_reasons,
)
from segue.errors import ConfigError
from segue.extras import Extra
from segue.kernels.cpu.build import Kernels

MORE = Extra(name="more", modules=("no_such_module",), purpose="more")


def setting(
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 16,
    heads: int = 6,
    head_dim: int = 64,
) -> Setting:
    shape = AttentionShape(num_heads=heads, num_kv_heads=2, head_dim=head_dim, scale=0.1)
    return Setting(shape=shape, device=torch.device(device), dtype=dtype, page_size=page_size)


def entry(name: str, capabilities: Capabilities) -> BackendEntry:
    return BackendEntry(name=name, capabilities=capabilities, backend=f"nowhere:{name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A device with the backends `plain`, `quick` and `elsewhere`; `elsewhere` is not installed."""
    anything = {"devices": ("cuda",), "dtypes": (torch.bfloat16,)}
    entries = [
        entry("plain", Capabilities(**anything, graphs=True)),
        entry("quick", Capabilities(**anything, architectures=((9, 0),))),
        entry("elsewhere", Capabilities(**anything, package=("no_such_module", MORE))),
    ]
    monkeypatch.setattr(registry, "_BACKENDS", {each.name: each for each in entries})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: object) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(registry, "TABLE", path)


@pytest.mark.parametrize(("why_not", "name"), [("", "avx512"), ("there is no compiler", "cpu")])
def test_auto_takes_the_cpus_kernels_where_they_can_be_built(
    monkeypatch: pytest.MonkeyPatch, why_not: str, name: str
) -> None:
    monkeypatch.setattr(registry, "kernels", lambda: Kernels(why_not=why_not))
    assert select("auto", setting(page_size=1)).name == name
    assert select("auto", setting(page_size=1, dtype=torch.float32)).name == "cpu"
    assert select("auto", setting(page_size=1, head_dim=32)).name == "cpu"


def test_auto_takes_a_backend_that_reads_fp8_for_a_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "kernels", lambda: Kernels(why_not=""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for device, deterministic, name in (
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu-invariant"),
        ("cuda", False, "triton"),
        ("cuda", True, "triton-invariant"),
    ):
        wanted = replace(setting(device, page_size=64), fp8_kv=True, deterministic=deterministic)
        assert select("auto", wanted).name == name
    for device, other in (("cpu", "avx512"), ("cuda", "fa3"), ("cuda", "fa3,triton")):
        with pytest.raises(ConfigError, match="it reads no KV cache in FP8; leave --kv-cache-dtype or"):
            select(other, replace(setting(device), fp8_kv=True))


def test_auto_takes_the_fastest_measured_backend_for_each_half_and_size(cuda, tmp_path) -> None:
    fast = ["elsewhere", "quick", "plain"]
    halves = {"prefill": {"64": ["plain"], "256": fast, "1024": fast}, "decode": ["removed", "plain"]}
    measured(cuda, tmp_path, {"9.0": {"64": {"16": halves}}})
    selection = select("auto", setting("cuda"))
    assert [(most, entry.name) for most, entry in selection.prefill] == [(64, "plain"), (1024, "quick")]
    assert selection.name == "quick (plain up to 64 tokens),plain"
    assert not selection.graphs
    assert selection.why == (
        "plain is the fastest that can be used, as measured on compute capability 9.0 with heads of 64 and "
        "pages of 16 tokens; quick is the fastest that can be used, as measured on compute capability 9.0 "
        "with heads of 64 and pages of 16 tokens"
    )
    assert select("quick,auto", setting("cuda")).name == "quick,plain"
    cuda.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert select("auto", setting("cuda")).name == "plain"


def test_auto_takes_the_first_supported_backend_where_nothing_was_measured(cuda, tmp_path) -> None:
    halves = {"prefill": {"64": ["quick"]}, "decode": ["quick"]}
    measured(cuda, tmp_path, {"9.0": {"128": {"16": halves}}, "8.0": {"64": {"16": halves}}})
    selection = select("auto", setting("cuda"))
    assert selection.name == "plain"
    assert selection.why == "plain is the first in the order of preference that runs on cuda"


def test_each_backend_has_its_reasons_against_a_setting(cuda) -> None:
    cuda.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = registry.verdicts(setting("cuda"))
    assert list(found) == ["plain", "quick", "elsewhere"] and found["plain"] == []
    assert "compute capability (8, 0)" in found["quick"][0] and "segue[more]" in found["elsewhere"][0]


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_auto_takes_fa3_for_many_tokens_on_every_device_of_compute_capability_9_0(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    installed = {"flash_attn_3": ModuleType("flash_attn_3"), "flash_attn_3._C": ModuleType("flash_attn_3._C")}
    for module, fake in installed.items():
        monkeypatch.setitem(sys.modules, module, fake)
    selection = select("auto", setting("cuda"))
    assert selection.prefill[-1][1].name == "fa3" and selection.decode.name == "triton"
    for other in ((8, 0), (8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, other=other: other)
        assert select("auto", setting("cuda")).name == "triton"


def test_the_stored_table_names_backends_that_exist() -> None:
    for device in json.loads(registry.TABLE.read_text()).values():
        for pages in device.values():
            for halves in pages.values():
                rankings = [*halves["prefill"].values(), halves["decode"]]
                assert all(set(ranking) <= set(names()) for ranking in rankings)
                assert list(map(int, halves["prefill"])) == sorted(map(int, halves["prefill"]))


def test_deterministic_takes_a_deterministic_backend_and_refuses_others(cuda, tmp_path) -> None:
    fast = {"prefill": {"64": ["plain"]}, "decode": ["plain"]}
    measured(cuda, tmp_path, {"9.0": {"64": {"16": fast}}})
    same = Capabilities(devices=("cuda",), dtypes=(torch.bfloat16,), deterministic=True)
    cuda.setitem(registry._BACKENDS, "same", entry("same", same))
    deterministic = replace(setting("cuda"), deterministic=True)
    assert select("auto", setting("cuda")).name == "plain"
    assert select("auto", deterministic).name == select("same", deterministic).name == "same"
    for name in ("plain", "auto,plain"):
        with pytest.raises(ConfigError, match=r"'plain' .*depend on the batch.*leave --attention-backend"):
            select(name, deterministic)


def test_every_backend_names_a_class_that_exists() -> None:
    for each in registry._BACKENDS.values():
        module, _, name = each.backend.partition(":")
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None, module
        tree = ast.parse(Path(spec.origin).read_text())  # it may not be importable: Triton comes with CUDA
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_the_deterministic_backends_of_cuda() -> None:
    entries = registry._BACKENDS.values()
    found = [each for each in entries if each.capabilities.deterministic]
    assert [each.name for each in found if "cuda" in each.capabilities.devices] == ["triton-invariant"]


def test_prefill_and_decode_backends_are_selected_separately(cuda) -> None:
    selection = select("quick,plain", setting("cuda"))
    assert (selection.name, selection.graphs) == ("quick,plain", False)
    assert select("plain,plain", setting("cuda")).name == select("plain", setting("cuda")).name == "plain"
    assert select("plain", setting("cuda")).graphs
    assert select("plain", setting("cuda")).why == "--attention-backend names it"


def test_a_third_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill,decode"):
        select("cpu,cpu,cpu", setting())


@pytest.mark.parametrize("name", ["cpu,cpu-invariant", "cpu-invariant,cpu"])
def test_two_backends_on_a_cpu_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}': on a CPU one backend does both halves; name one"):
        select(name, setting())
    assert select("cpu,cpu", setting()).name == "cpu"


@pytest.mark.parametrize("name", ["warp", "cpu,warp", "warp,cpu", ""])
def test_the_error_for_an_unknown_backend_names_it_and_all_backends(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        select(name, setting())
    assert "warp" in error.value.message or not name
    assert all(known in error.value.message for known in names())


@pytest.mark.parametrize(
    ("device", "dtype", "word"), [("cuda", torch.float32, "cuda"), ("cpu", torch.float64, "float64")]
)
def test_the_error_for_an_unsupported_setting_names_it(device: str, dtype: torch.dtype, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        select("cpu", setting(device, dtype))
    assert word in error.value.message


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"page_sizes": (1, 64)}, "page size 16"),
        ({"head_dims": (128,)}, "head size 64"),
        ({"max_group_size": 2}, "3 query heads"),
        ({"architectures": ((10, 0),)}, "compute capability (9, 0)"),
        ({"package": ("no_such_module", MORE)}, "segue[more]"),
    ],
)
def test_every_limit_is_checked(cuda, limits: dict[str, object], word: str) -> None:
    allowed = {"devices": ("cuda",), "dtypes": (torch.bfloat16,)}
    assert unsupported_reasons(Capabilities(**allowed), setting("cuda")) == []  # type: ignore[arg-type]
    found = unsupported_reasons(Capabilities(**allowed, **limits), setting("cuda"))  # type: ignore[arg-type]
    assert len(found) == 1 and word in found[0]
