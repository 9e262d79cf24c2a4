"""Lists the models in the user's cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from segue.checkpoint import bundled


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
    origins = _origins(cache_dir)
    for directory in sorted((cache_dir / "converted").glob("*/*")):
        if directory.name.startswith(".") or not (directory / "config.json").exists():
            continue
        origin = origins.get(directory.parent.name)
        yield InstalledModel(
            name=origin.stem if origin else directory.parent.name[:12],
            kind="converted",
            path=directory,
            num_bytes=sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
        )


def _origins(cache_dir: Path) -> dict[str, Path]:
    """Map each SHA-256 to the path of the file that had this SHA-256 when the cache hashed the file."""
    found = {}
    for record in (cache_dir / "hashes").glob("*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # without the record only a name is lost
            known = json.loads(record.read_text())
            found[known["sha256"]] = Path(known["path"])
    return found
