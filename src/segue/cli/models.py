"""``segue models``: the models of this machine and of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from segue.cli.flags import setting
from segue.cli.sampling import nearest
from segue.cli.serving import size_in_words
from segue.config import EngineConfig
from segue.errors import CacheDirectoryError, ModelFileError

if TYPE_CHECKING:
    from segue.checkpoint.installed import InstalledModel

MODEL = "Model"
models_app = typer.Typer(help="List, fetch, find, check and remove models.", invoke_without_command=True)

CacheDir = Annotated[str | None, setting("cache_dir", "Where models are kept.", group=MODEL)]
Revision = Annotated[
    str | None,
    setting("revision", "Branch, tag or commit of the hub; default: main.", group=MODEL),
]
ModelName = Annotated[
    str | None,
    typer.Argument(
        help="Hub id: owner/name, or owner/name:QUANTIZATION for a GGUF file. Default: the bundled model.",
        show_default=False,
    ),
]
KnownName = Annotated[
    str | None,
    typer.Argument(
        help="Name, as `segue models list` has it. Default: the bundled model.", show_default=False
    ),
]


def cache_directory(given: str | None) -> str:
    """Return the cache directory: the given one or, for None, that of the environment or the default."""
    return (EngineConfig.create() if given is None else EngineConfig.create(cache_dir=given)).cache_dir


@models_app.callback()
def without_command(context: typer.Context, cache_dir: CacheDir = None) -> None:
    """List, fetch, find, check and remove models; without a command, they are listed."""
    if context.invoked_subcommand is None:
        list_(cache_dir)


@models_app.command("list")
def list_(cache_dir: CacheDir = None) -> None:
    """List the bundled model, the models converted from GGUF files, and those of the hub."""
    from segue.checkpoint.installed import installed_models

    table = Table(box=None, pad_edge=False)
    for column in ("model", "kind", "size", "revision", "path"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    with _reading(cache_dir) as directory:
        for each in installed_models(directory):
            size = "-" if each.num_bytes is None else size_in_words(each.num_bytes)
            kind = each.kind if each.num_bytes is not None else f"{each.kind}, fetched at first use"
            revision = each.revisions[0][:8] if each.revisions else ""
            table.add_row(escape(each.name), kind, size, revision, escape(str(each.path)))
    Console(highlight=False).print(table)


@models_app.command()
def pull(
    name: ModelName = None,
    revision: Revision = None,
    again: Annotated[
        bool, setting("again", "Fetch also what is there, as after `verify` has found damage.", group=MODEL)
    ] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch a model, and print its path. After an interruption, only what is missing is fetched."""
    from segue.checkpoint import bundled, hub

    if name is None or name == bundled.NAME:
        with _reading(cache_dir) as directory:
            if again:
                (directory / "bundled" / bundled.FILE).unlink(missing_ok=True)
            typer.echo(bundled.ensure_bundled_model(directory))
        return
    if hub.parse_id(name) is None:
        raise ModelFileError(f"{name!r} is no hub id; give owner/name, or owner/name:QUANTIZATION")
    typer.echo(hub.fetch(name, weights=True, revision=revision, again=again))


@models_app.command()
def path(name: KnownName = None, revision: Revision = None, cache_dir: CacheDir = None) -> None:
    """Print where a model is, for --model and for scripts; nothing is fetched."""
    with _reading(cache_dir) as directory:
        typer.echo(_complete(name, revision, directory).path)


@models_app.command()
def verify(name: KnownName = None, revision: Revision = None, cache_dir: CacheDir = None) -> None:
    """Read a model's files, and compare them with their checksums; the exit code is 1 if one differs."""
    from segue.checkpoint.installed import find_faults

    with _reading(cache_dir) as directory:
        model = _complete(name, revision, directory)
        faults = list(find_faults(model))
    if faults:
        again = f"`segue models pull {model.name} --again` fetches it again"
        remedy = "the next start converts it again" if model.kind == "converted" else again
        raise ModelFileError(f"model {model.name!r}: {'; '.join(faults)}; {remedy}")
    typer.echo(f"{model.name}: {size_in_words(model.num_bytes or 0)}, every file has its checksum")


@models_app.command()
def rm(
    name: Annotated[str, typer.Argument(help="Name, as `segue models list` has it.")],
    revision: Revision = None,
    cache_dir: CacheDir = None,
) -> None:
    """Remove a model from this machine; with --revision, only that revision of it."""
    from segue.checkpoint.installed import remove

    with _reading(cache_dir) as directory:
        for model in _found(name, revision, directory):
            remove(model)
            typer.echo(f"removed {model.path}, {size_in_words(model.num_bytes or 0)}")


def _found(name: str, revision: str | None, cache_dir: Path) -> list[InstalledModel]:
    """Return the models of this name that are here; raises ModelFileError if there is none."""
    from segue.checkpoint import bundled, hub
    from segue.checkpoint.installed import installed_models

    here = [each for each in installed_models(cache_dir) if each.num_bytes is not None]
    found = [each for each in here if each.name == name and (revision is None or each.is_at(revision))]
    if found:
        return found
    of = "" if revision is None else f" of revision {revision!r}"
    remedy = "`segue models list` shows what is here"
    if name == bundled.NAME or hub.parse_id(name):
        remedy += f", `segue models pull {name}` fetches it"
    near = nearest(name, [each.name for each in here])
    raise ModelFileError(f"model {name!r}{of} is not on this machine{near}; {remedy}")


def _complete(name: str | None, revision: str | None, cache_dir: Path) -> InstalledModel:
    """Return the model of this name that a start would use; None is the bundled one.

    Raises:
        ModelFileError: it is not here, or not all of it.
    """
    from segue.checkpoint import bundled, hub

    found = _found(bundled.NAME if name is None else name, revision, cache_dir)
    if found[0].kind != "hub":
        return found[0]
    model = next((each for each in found if each.is_at(revision or hub.MAIN)), found[0])
    if hub.cached(model.name, model.revisions[0]) is None:
        remedy = f"`segue models pull {model.name}` fetches what is missing"
        raise ModelFileError(f"model {model.name!r} is not here completely; {remedy}")
    return model


@contextmanager
def _reading(cache_dir: str | None) -> Iterator[Path]:
    """Return the cache directory; an OSError of the block becomes an error that names it."""
    directory = Path(cache_directory(cache_dir))
    try:
        yield directory
    except OSError as error:
        raise CacheDirectoryError(
            f"the cache directory {directory} cannot be read or written ({error.strerror}); "
            "choose another with --cache-dir"
        ) from error
