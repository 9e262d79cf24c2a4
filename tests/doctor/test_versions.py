"""Packages that are missing, broken or too old."""

from __future__ import annotations

from typing import NoReturn

import pytest

from segue.config import EngineConfig
from segue.doctor import versions
from segue.doctor.findings import Finding
from segue.doctor.versions import describe_extras, describe_versions
from segue.extras import Extra


def found() -> dict[str, Finding]:
    return {each.name: each for each in describe_versions()}


def test_what_is_installed_is_listed() -> None:
    listed = found()
    assert list(listed)[:4] == ["Python", "Segue", "torch", "triton"]
    assert "built for" in listed["torch"].value
    assert {each.status for each in listed.values()} == {"ok"}


def test_torch_that_cannot_be_imported_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> NoReturn:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(versions, "import_module", broken)
    torch = found()["torch"]
    assert torch.status == "failed" and "libcudart" in torch.value and "install" in torch.remedy


def test_packages_that_are_missing_or_too_old_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["no-such-package>=2", "rich>=999", "gguf>=0.1", "elsewhere>=1; extra == 'more'"]
    monkeypatch.setattr(versions.metadata, "requires", lambda name: needs)
    listed = found()
    assert listed["no-such-package"].value == "not installed"
    assert listed["no-such-package"].remedy.endswith("install 'no-such-package>=2'")
    assert listed["rich"].status == "failed" and listed["rich"].why == "Segue needs rich>=999"
    assert "gguf" not in listed and "elsewhere" not in listed


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fa3", {"attention_backend": "fa3,triton"}),
        ("flashinfer", {"attention_backend": "triton,flashinfer"}),
        ("nixl", {"pd_transport": "nixl", "role": "prefill"}),
        ("etcd", {"discovery": "file,etcd", "shadow_mode": True}),
        ("kubernetes", {"discovery": "kubernetes", "shadow_mode": True}),
    ],
)
def test_an_optional_package_must_be_there_if_an_option_asks_for_it(
    name: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Extra(name=name, modules=("no_such_module",), purpose="some things")
    monkeypatch.setattr(versions, "EXTRAS", {name: missing})
    for given, status in (({}, "missing"), (options, "failed")):
        (finding,) = describe_extras(EngineConfig.create({}, **given))
        assert (finding.status, finding.why) == (status, "needed for some things")
        assert finding.remedy.endswith(f"install 'segue[{name}]'")
