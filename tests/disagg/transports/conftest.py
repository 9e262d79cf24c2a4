"""Readers and writers that end with the test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from segue.kvcache.pool import KVShape
from tests.disagg.transports.ranks import (
    Reader,
    Remote,
    Sender,
    filled_pool,
    shape_of_pool,
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_reader(stack: ExitStack, tmp_path: Path) -> Callable[..., Reader]:
    numbers = itertools.count()

    def make(shape: KVShape | None = None) -> Reader:
        reader = Reader(tmp_path / f"rank{next(numbers)}", shape)
        stack.callback(reader.close)
        return reader

    return make


@pytest.fixture
def make_sender(stack: ExitStack) -> Callable[..., Sender]:
    def make(shape: KVShape | None = None, session: str = "prefill/0") -> Sender:
        sender = Sender(filled_pool(shape or shape_of_pool()), session)
        stack.callback(sender.transport.close)
        return sender

    return make


@pytest.fixture
def make_remote(stack: ExitStack) -> Callable[..., Remote]:
    def make(kind: type, shape: KVShape | None = None) -> Remote:
        remote = Remote(kind, shape or shape_of_pool())
        stack.callback(remote.end)
        return remote

    return make


@pytest.fixture
def reader(make_reader: Callable[..., Reader]) -> Reader:
    return make_reader()


@pytest.fixture
def sender(make_sender: Callable[..., Sender]) -> Sender:
    return make_sender()
