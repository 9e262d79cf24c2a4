"""A group that a trainer cannot host."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from segue.messages.weight_operations import Group
from segue.trainer.group import TrainerGroup


def test_a_group_that_cannot_be_hosted_is_reported_at_once() -> None:
    with socket.create_server(("", 0)) as taken:
        group = Group(
            name="g",
            master_address="127.0.0.1",
            master_port=taken.getsockname()[1],
            rank_offset=0,
            world_size=2,
            backend="gloo",
        )
        began = time.monotonic()
        hosted = TrainerGroup(group, torch.device("cpu"), timeout_s=60)
        try:
            assert hosted.has_met.wait(60)
            with pytest.raises(RuntimeError, match="the group 'g' was not joined: "):
                hosted.wait(20, lambda: None)
            assert time.monotonic() - began < 20
        finally:
            hosted.leave()
