"""The models that are on this machine: the bundled one, those converted from GGUF files, those of the hub."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from segue.checkpoint import bundled, cache, hub
from segue.checkpoint.gguf import convert
from segue.checkpoint.model_files import INDEX, open_file
from segue.checkpoint.source import read_json
from segue.errors import ModelFileError

_QUANTIZATION = re.compile(r"(?:^|[-._/])([A-Za-z0-9_]+)\.gguf$")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """A model that can be named on the command line."""

    name: str
    kind: Literal["bundled", "converted", "hub"]
    num_bytes: int | None  # None: not fetched yet
    path: Path  # a directory or a GGUF file
    revisions: tuple[str, ...] = ()  # of a hub's model: the commit, and the branches and tags that are at it

    def is_at(self, revision: str) -> bool:
        """Whether this is a revision: a branch, a tag, or the beginning of a commit."""
        return revision in self.revisions or (bool(self.revisions) and self.revisions[0].startswith(revision))


def installed_models(cache_dir: Path) -> Iterator[InstalledModel]:
    """Yield the bundled model, then the models converted from GGUF files, then those of the hub's cache."""
    path = cache_dir / "bundled" / bundled.FILE
    num_bytes = path.stat().st_size if path.exists() else None
    yield InstalledModel(name=bundled.NAME, kind="bundled", num_bytes=num_bytes, path=path)
    for config in sorted((cache_dir / "converted").glob("[!.]*/[!.]*/config.json")):
        directory = config.parent
        try:
            name = read_json(config).get("_name_or_path")
        except ModelFileError:  # only the name is lost
            name = None
        num_bytes = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
        name = str(name or directory.parent.name[:12])
        yield InstalledModel(name=name, kind="converted", num_bytes=num_bytes, path=directory)
    yield from _of_hub()


def _of_hub() -> Iterator[InstalledModel]:
    """Yield the models of the hub's cache; each GGUF file is one."""
    for repository in sorted(hub.cache_directory().glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        refs = sorted(path for path in (repository / "refs").rglob("*") if path.is_file())
        commits = {str(path.relative_to(repository / "refs")): path.read_text().strip() for path in refs}
        for snapshot in sorted((repository / "snapshots").glob("*")):
            files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
            revisions = (snapshot.name, *(ref for ref, commit in commits.items() if commit == snapshot.name))
            for path in files:
                if match := _QUANTIZATION.search(str(path.relative_to(snapshot))):
                    yield _hub_model(f"{name}:{match[1]}", path, revisions, [path])
            if (snapshot / "config.json").exists():
                own = [path for path in files if path.suffix != ".gguf"]
                yield _hub_model(name, snapshot, revisions, own)


def _hub_model(name: str, path: Path, revisions: tuple[str, ...], files: list[Path]) -> InstalledModel:
    num_bytes = sum(file.stat().st_size for file in files)
    return InstalledModel(name=name, kind="hub", num_bytes=num_bytes, path=path, revisions=revisions)


def find_faults(model: InstalledModel) -> Iterator[str]:
    """Yield what is wrong with a model's files, compared with what they were published or written with.

    The hub's cache names each file by its hash, so that no network is needed. Files are read completely.
    """
    match model.kind:
        case "bundled":
            if cache.sha256(model.path) != bundled.SHA256:
                yield f"{model.path.name} has another SHA-256 than was published"
        case "converted":
            if (damage := cache.find_damage(model.path / convert.RECORD)) is not None:
                yield damage
        case "hub":
            files = [model.path] if model.path.is_file() else sorted(model.path.rglob("*"))
            for path in files:
                if path.is_symlink() or path.is_file():
                    yield from _faults_of_file(path)
            yield from _missing_shards(model.path / INDEX)


def _faults_of_file(path: Path) -> Iterator[str]:
    """Yield the fault of a file of the hub's cache, whose real name is its hash, if it has one."""
    expected = path.resolve().name
    if not path.exists():
        yield f"{path.name} is missing"
    elif re.fullmatch("[0-9a-f]{64}", expected):
        if cache.sha256(path) != expected:
            yield f"{path.name} has another SHA-256 than the hub's, {expected}"
    elif re.fullmatch("[0-9a-f]{40}", expected) and _git_hash(path) != expected:
        yield f"{path.name} has another hash than the hub's, {expected}"


def _git_hash(path: Path) -> str:
    """Return the SHA-1 that git has for a file: the hub's name of those that are small."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open_file(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _missing_shards(index: Path) -> Iterator[str]:
    """Yield the files of weights that an index names and that are not there."""
    if not index.is_file():
        return
    with suppress(ModelFileError, AttributeError):  # then its hash is wrong, which is a fault already
        for name in sorted(set(read_json(index).get("weight_map", {}).values())):
            if not (index.parent / str(name)).exists():
                yield f"{name} is missing"


def remove(model: InstalledModel) -> None:
    """Delete a model's files; raises OSError. Files that another revision of a hub's model has too stay."""
    if model.kind == "bundled":
        model.path.unlink(missing_ok=True)
        return
    if model.kind == "converted":
        shutil.rmtree(model.path)
        with suppress(OSError):  # another format of the same file is in it
            model.path.parent.rmdir()
        return
    snapshot = next(each for each in (model.path, *model.path.parents) if each.parent.name == "snapshots")
    repository = snapshot.parent.parent
    files = [model.path] if model.path.is_file() else [path for path in snapshot.rglob("*") if path.is_file()]
    if model.path.is_dir():
        files = [path for path in files if path.suffix != ".gguf"]
    blobs = {path.resolve() for path in files}
    for path in files:
        path.unlink()
    used = {path.resolve() for path in (repository / "snapshots").rglob("*") if path.is_file()}
    for blob in blobs - used:
        blob.unlink(missing_ok=True)
    if not used:
        shutil.rmtree(repository)  # with what an interrupted fetch has left
    elif not any(path.is_file() for path in snapshot.rglob("*")):
        shutil.rmtree(snapshot)
