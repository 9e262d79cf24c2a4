"""Lists the models in the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from segue.checkpoint import bundled
from segue.checkpoint.source import read_json
from segue.errors import ModelFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """One model in the cache; ``num_bytes`` is None if the model is not fetched yet."""

    name: str
    kind: str
    path: Path
    num_bytes: int | None


def installed_models(cache_dir: Path) -> Iterator[InstalledModel]:
    """Yield the bundled model, then the models converted from GGUF files."""
    path = cache_dir / "bundled" / bundled.FILE
    fetched = path.exists()
    yield InstalledModel(
        name=bundled.NAME,
        kind="bundled" if fetched else "bundled, fetched at first use",
        path=path,
        num_bytes=path.stat().st_size if fetched else None,
    )
    for config in sorted((cache_dir / "converted").glob("[!.]*/[!.]*/config.json")):
        directory = config.parent
        try:
            name = read_json(config).get("_name_or_path")
        except ModelFileError:  # only the name is lost
            name = None
        yield InstalledModel(
            name=str(name or directory.parent.name[:12]),
            kind="converted",
            path=directory,
            num_bytes=sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
        )
