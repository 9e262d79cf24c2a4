"""When a push is posted, and when it has ended, one transfer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch

from segue.disagg.layout import PieceSpan, plan
from segue.disagg.transports import nixl_staging
from segue.disagg.transports.nixl_agent import NixlAgent, PoolBlob, StagedPieces
from segue.disagg.transports.nixl_pushes import NixlPush, NixlPushes, NixlTarget
from segue.disagg.transports.nixl_remotes import OpenPools
from segue.disagg.transports.nixl_staging import Staging
from segue.disagg.transports.pieces import HostHeads
from segue.errors import TransportError
from tests.disagg.transports.ranks import filled_pool, shape_of_pool

POOL = filled_pool(shape_of_pool())
TARGET = HostHeads(filled_pool(shape_of_pool(num_kv_heads=1)))._shape


class FakeAgent:
    """Notes what is posted; the test says how each transfer ends."""

    def __init__(self) -> None:
        self.posted: list[tuple[list[int], list[int]]] = []  # (pages or slots, pages of the peer)
        self.ended: dict[int, bool] = {}  # transfer -> whether it has failed
        self.num_connections = 0
        self.on_disconnect: Callable[[], None] = lambda: None

    def stage(self, num_pieces: int, piece_bytes: int) -> StagedPieces:
        data = torch.zeros((num_pieces, piece_bytes), dtype=torch.uint8)
        return StagedPieces(data=data, pieces=None, memory=None)

    def connect(self, blob: PoolBlob, span: PieceSpan) -> object:
        self.num_connections += 1
        return object()

    def disconnect(self, remote: object) -> None:
        self.on_disconnect()

    def post(self, remote: object, sources: Sequence[int], targets: Sequence[int], staged: object) -> int:
        self.posted.append((list(sources), list(targets)))
        return len(self.posted) - 1

    def has_ended(self, transfer: int) -> bool:
        if self.ended.get(transfer):
            raise TransportError("the connection is lost")
        return transfer in self.ended


class PushSide:
    """The pushes of a rank with two heads to one that needs one, with room for two pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nixl_staging, "STAGING_BYTES", 0)
        self.agent = FakeAgent()
        agent = cast(NixlAgent, self.agent)
        blob = PoolBlob(metadata=b"", address=0, memory="DRAM", device=0, num_pages=6, shape=TARGET)
        self.remotes = OpenPools(agent)
        self.remote = self.remotes.join(blob, PieceSpan(start=0, num_bytes=1))
        self.staging = Staging(agent, HostHeads(POOL), plan(1, 2, kv_heads=2)[0], TARGET, most=6)
        self.pushes = NixlPushes(agent, self.remotes)

    def begin(self, ticket: int, *pages: int, staged: bool = True) -> NixlPush:
        staging = self.staging if staged else None
        target = NixlTarget(num_pages=6, remote=self.remote, staging=staging)
        push = NixlPush(ticket=ticket, target=target, sources=[*pages], targets=[page + 10 for page in pages])
        self.pushes.begin(push)
        return push

    def advance(self) -> list[tuple[int, str]]:
        """Returns the tickets of the pushes that have ended, and their errors."""
        ended = self.pushes.advance()
        return [(push.ticket, "" if push.error is None else push.error.message) for push in ended]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> PushSide:
    return PushSide(monkeypatch)


def test_whole_pages_are_one_transfer(side: PushSide) -> None:
    side.begin(1, 0, 1, 2, 3, staged=False)
    assert side.advance() == [] and side.agent.posted == [([0, 1, 2, 3], [10, 11, 12, 13])]
    side.agent.ended[0] = False
    assert side.advance() == [(1, "")] and len(side.pushes) == 0 and side.remote.num_transfers == 0


def test_pieces_are_posted_as_far_as_there_is_room(side: PushSide) -> None:
    side.begin(1, 3, 1, 2)
    side.begin(2, 5)
    assert side.advance() == []
    assert side.agent.posted == [([0], [13]), ([1], [11])]
    assert side.staging.staged.data[:2, 0].tolist() == [4, 2], "the first bytes of pages 3 and 1"
    side.agent.ended[1] = False
    assert side.advance() == [] and side.agent.posted[2:] == [([1], [12])]
    side.agent.ended |= {0: False, 2: False}
    assert side.advance() == [(1, "")] and side.agent.posted[3:] == [([0], [15])]
    side.agent.ended[3] = False
    assert side.advance() == [(2, "")]


def test_after_a_failure_nothing_more_is_posted_and_what_is_under_way_is_awaited(side: PushSide) -> None:
    side.begin(1, 0, 1, 2, 3)
    side.advance()
    side.agent.ended[0] = True
    assert side.advance() == [] and len(side.agent.posted) == 2, "its other transfer may still be read"
    side.agent.ended[1] = False
    assert side.advance() == [(1, "the connection is lost")] and len(side.agent.posted) == 2
    assert side.agent.num_connections == 1
    side.begin(2, 4)
    side.advance()
    assert side.agent.num_connections == 2, "the connection is opened anew"


def test_memory_of_a_push_that_has_failed_is_used_again(side: PushSide) -> None:
    side.begin(1, 0, 1)
    side.advance()
    side.agent.ended |= {0: True, 1: True}
    assert side.advance() == [(1, "the connection is lost")]
    pieces = side.staging.staged.data[:, 0]
    found: list[list[int]] = []
    side.agent.on_disconnect = lambda: found.append(pieces.tolist())
    side.begin(2, 2, 3)
    side.advance()
    assert found == [[1, 2]], "they are overwritten only when the connection that failed is closed"
    assert pieces.tolist() == [3, 4]
    assert sorted(slots for slots, _ in side.agent.posted[2:]) == [[0], [1]]


def test_a_push_without_pages_ends_at_once(side: PushSide) -> None:
    side.begin(1)
    assert side.advance() == [(1, "")] and side.agent.posted == []
