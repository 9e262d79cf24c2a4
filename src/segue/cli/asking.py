"""What ``segue chat`` and ``segue generate`` have in common: sampling flags, and where the model is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from segue.cli.backends import LocalModel, RemoteModel
from segue.cli.flags import setting
from segue.cli.quiet import quiet
from segue.cli.remote import Remote
from segue.config import EngineConfig

if TYPE_CHECKING:
    from segue.api.engine import Engine

SAMPLING = "Sampling"
MaxTokens = Annotated[
    int | None,
    setting("max_tokens", "Maximum tokens of an answer; default: the rest of the context.", group=SAMPLING),
]
Temperature = Annotated[float, setting("temperature", "0 always takes the likeliest token.", group=SAMPLING)]
TopP = Annotated[
    float,
    setting("top_p", "Sample from the likeliest tokens that have this probability together.", group=SAMPLING),
]


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


@contextmanager
def opened(config: EngineConfig, url: str | None, api_key: str | None) -> Iterator[LocalModel | RemoteModel]:
    """Return the model of the server at ``url`` or, without one, that of an engine of this block.

    Raises:
        SegueError: the server does not answer, or the engine cannot start.
    """
    if url is not None:
        yield RemoteModel(Remote(url, api_key))
        return
    with engine_of(config) as engine:
        yield LocalModel(engine)


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[Engine]:
    """Run an engine for one command; it is shut down when the ``with`` block ends."""
    config = quiet(config)
    from segue.api.engine import Engine  # `segue router` starts 0.2 s sooner without it

    with Console(stderr=True).status(f"Loading {config.model or 'the bundled model'} …"):
        engine = Engine(**asdict(config))
    with engine:
        yield engine
