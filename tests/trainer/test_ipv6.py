"""A group of a trainer and a rank that connect over IPv6."""

from __future__ import annotations

import socket

import pytest
import torch

from segue.messages.weight_operations import Group, JoinGroup
from segue.trainer.group import TrainerGroup, listen_at
from segue.weight_update.transport.joining import Groups
from segue.weight_update.transport.rendezvous import bracketed
from tests.weight_update.conftest import join


def test_a_group_is_joined_at_an_address_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    device = torch.device("cpu")
    listener = listen_at(None)
    port = listener.getsockname()[1]
    group = Group(
        name="six", master_address="::1", master_port=port, rank_offset=0, world_size=2, backend="gloo"
    )
    hosted = TrainerGroup(group, device, timeout_s=20, listener=listener)
    groups = Groups(device)
    try:
        request = JoinGroup(
            master_address=bracketed("::1"),
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name="six",
            backend="gloo",
        )
        join(groups, request.group, 0, 20)
        hosted.wait(20, lambda: None)
        joined = groups.get("six")
        assert joined is not None and joined.alive
    finally:
        groups.close()
        hosted.leave()
