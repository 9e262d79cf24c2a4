"""A group that a trainer cannot host."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from segue.messages.weight_operations import Group
from segue.trainer.group import TrainerGroup, listen_at


def group_at(listener: socket.socket, *, world_size: int) -> Group:
    """A group whose first rank listens at the port of a socket."""
    return Group(
        name="g",
        master_address="127.0.0.1",
        master_port=listener.getsockname()[1],
        rank_offset=0,
        world_size=world_size,
        backend="gloo",
    )


def test_a_group_that_cannot_be_hosted_is_reported_at_once() -> None:
    with socket.create_server(("", 0)) as taken:
        group = group_at(taken, world_size=2)
        began = time.monotonic()
        hosted = TrainerGroup(group, torch.device("cpu"), timeout_s=60)
        try:
            assert hosted.has_met.wait(60)
            with pytest.raises(RuntimeError, match="the group 'g' was not joined: "):
                hosted.wait(20, lambda: None)
            assert time.monotonic() - began < 20
        finally:
            hosted.leave()


def test_a_group_that_was_not_joined_keeps_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise RuntimeError("no backend")

    monkeypatch.setattr("segue.trainer.group.make_backend", fail)
    listener = listen_at(None)
    port = listener.getsockname()[1]
    group = group_at(listener, world_size=1)
    hosted = TrainerGroup(group, torch.device("cpu"), timeout_s=20, listener=listener)
    with pytest.raises(RuntimeError, match="no backend"):
        hosted.wait(20, lambda: None)
    hosted.leave()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 20)


@pytest.mark.parametrize(
    "text",
    [
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 59000",  # until NCCL 2.29
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1",  # since 2.30
    ],
)
def test_ranks_on_one_gpu_are_an_error_with_a_remedy(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("segue.trainer.group.make_backend", fail)
    listener = listen_at(None)
    group = group_at(listener, world_size=1)
    hosted = TrainerGroup(group, torch.device("cpu"), timeout_s=20, listener=listener)
    with pytest.raises(RuntimeError, match="on one GPU: use backend='gloo'"):
        hosted.wait(20, lambda: None)
    hosted.leave()


def test_the_port_of_a_group_is_taken_from_its_choice_on() -> None:
    """The store gets the socket itself: a port that was free may be taken before it is used."""
    with listen_at(None) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", port))
        with listen_at(port) as second:
            assert second.getsockname()[1] != port
            # Engines may connect before the store is there.
            early = socket.create_connection(("127.0.0.1", second.getsockname()[1]), 20)
            early.close()
            group = group_at(second, world_size=2)
            hosted = TrainerGroup(group, torch.device("cpu"), timeout_s=20, listener=second)
            hosted.leave()
            assert second.fileno() == -1, "it was handed on"
            assert hosted._error is None
