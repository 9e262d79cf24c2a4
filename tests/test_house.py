"""Rules of the house: names are defined once, tests mirror the source, and old words stay away."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.links import anchors

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "segue"
PROGRAMS = [ROOT / name for name in ("bench", "examples", "scripts")]
# Folders of tests that are not about one room.
OTHERS = {"attack", "clients", "deploy", "docs", "e2e", "fixtures", "gpu", "support"}
# Test files about a whole room, or about several of its modules together.
WHOLE_ROOM = {
    "checkpoint": {"smollm2"},
    "kernels": {"kernels"},
    "layers": {"layers"},
    "model_runner": {"deterministic", "tensor_parallel"},
    "models": {"tensor_parallel"},
    "scheduler": {"host_cost", "properties", "warm_kv_properties"},
    "server": {"bad_input", "cross_site", "fuzz", "overload", "pausing", "streams"},
    "trainer": {"ipv6"},
    "": {"house", "layering", "surroundings"},
}
# The pattern of an old word, what to say instead, and a pattern of lines where the word means another thing.
GLOSSARY: list[tuple[str, str, str | None]] = [
    (r"\btrunks?\b", "forward graph", None),
    (r"\btails?\b", "sampling mode, or sampling graph", r"\btail\("),
    (r"\bsplit sums?\b", "split-K partials", None),
    (r"\binvariant[ _]products?\b|\bInvariantProduct\b", "batch-invariant GEMM", None),
    (r"\bgated (product|kernel)|\bgated_(product|linear)", "gate-up SiLU GEMM", None),
    (r"\bplacing\b|\bPlacement\b", "QK-norm, RoPE and KV store", None),
    (r"\.(tell|hear)\(", "send, on_reply", r"\bfile\.tell\(\)"),
    (r"\blook_up\b", "embed_inputs", None),
    (r"\blanding\b", "receive buffer", None),
    (r"\blive weights?\b|\bLiveWeights\b|\b(becomes?|became|make \w+) live\b", "served weights", None),
    (r"\bname[ _]tables?\b|\bNameTable\b", "weight map", None),
    (r"\b(arming|armed|ARMING|ARMED)\b", "posting receives, posted", r"`arming`"),
    (r"\b[Bb]orrow(s|ed|ing)?\b", "zero-copy", "borrowed at the office"),
    (r"\bgently\b", "in the background", None),
    (r"\bnum_wanted\b|\bctx\.wanted\b", "logits_indices", None),
    (r"\bq_starts\b", "cu_seqlens_q", None),
    (r"\bkv_rows\b", "slot_mapping", None),
    (r"\b(NewRow|RowExtras|new_rows|free_rows|rows_device)\b", "request slot", None),
    (r"(?<!\.)\blongest: int\b", "max_len", None),
    (r"\blimbo\b", "pending_free", None),
    (r"\bscheduler[./](proof|policy|report)\b", "invariants, queue, internal_state", None),
    (r"\bmodel_runner[./](choices|trial|delta|capturing)\b|\bChoices\b", "resolved_config and others", None),
    (r"\btrial (step|run)\b", "profile run", None),
    (
        r"\b(Host|Cuda)Wire\b|\btransport[./]wires\b|\bsync[./](joined|incoming|wires)\b",
        "gloo, nccl, group",
        None,
    ),
    (r"\bfrontend[./](arrival|installed|merge)\b", "tokenize, local_models, stream", None),
    (r"\bStepOutputs?\b", "DeviceStepResult, SchedulerOutput", None),
    (r"\bclass (Vocabulary|Broadcast|Session)\b", "RequestLimits and others", None),
    (r"\bmade-up\b", "dummy", None),
    (r"\bfloor of\b|\bfloor_milliseconds\b", "roofline", None),
]


def classes() -> dict[str, list[str]]:
    """The files that define each class, tests left out: their fakes may have the names of others."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for tree in (SOURCE, *PROGRAMS) for path in tree.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_class_name_is_defined_once() -> None:
    assert {name: paths for name, paths in classes().items() if len(paths) > 1} == {}


def test_every_room_has_its_tests() -> None:
    rooms = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    # The fused kernels need a GPU: tests/gpu has theirs.
    missing = {room for room in rooms if not any((ROOT / "tests" / room).glob("test_*.py"))}
    assert {str(room) for room in missing} <= {"kernels/triton", "messages"}


def test_every_test_file_is_named_for_what_it_tests() -> None:
    unnamed = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        room = path.parent.relative_to(ROOT / "tests")
        if room.parts and room.parts[0] in OTHERS:
            continue
        name = path.stem.removeprefix("test_")
        folders = [SOURCE / room, *([ROOT / "bench"] if room == Path("bench") else [])]
        modules = {module.stem for folder in folders for module in folder.glob("*.py")}
        whole = WHOLE_ROOM.get("" if room == Path(".") else str(room), set())
        if not (name in modules | whole or any(name.startswith(f"{module}_") for module in modules)):
            unnamed.append(str(path.relative_to(ROOT)))
    assert [name for name in unnamed if name != "tests/bench/test_readme_figures.py"] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    """The README is also the description of the package on an index, where only absolute links work.

    The project has no public address yet. Once it has one, that is named in one place, [project.urls] of
    pyproject.toml, and the links must begin with it.
    """
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    source = urls.get("Source", "").rstrip("/")
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text()):
        place, _, anchor = link.partition("#")
        if source:
            found = re.fullmatch(rf"{re.escape(source)}/(?:blob|raw)/[^/]+/(.+)", place)
            place = found[1] if found else "the link is not absolute"
        path = ROOT / place if place else ROOT / "README.md"
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(link)
    assert wrong == []


def prose() -> Iterator[Path]:
    """Every file that a reader of the project reads."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"))
    for folder, pattern in (("src", "*.py"), ("tests", "*.py"), ("bench", "*.py"), ("examples", "*.py")):
        yield from sorted((ROOT / folder).rglob(pattern))
    yield from sorted((ROOT / "docs").rglob("*.md"))


@cache
def texts() -> list[tuple[Path, str]]:
    """What they say, apart from this file."""
    found = (path for path in prose() if path != Path(__file__).resolve() and path.exists())
    return [(path, path.read_text()) for path in found]


@pytest.mark.parametrize(("word", "instead", "allowed"), GLOSSARY, ids=[word for word, _, _ in GLOSSARY])
def test_an_old_word_is_not_used(word: str, instead: str, allowed: str | None) -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in texts()
        if re.search(word, text, re.MULTILINE)  # the many files without it are not read line by line
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(word, line) and not (allowed and re.search(allowed, line))
    ]
    assert uses == [], f"say {instead}"
