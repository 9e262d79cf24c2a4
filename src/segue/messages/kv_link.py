"""What the thread of a worker's connections to other workers reports to the scheduler's loop.

``peer`` is the number of a connection, which is never used again in the process.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from segue.messages.kv import Hello, KVMessage

# Why a connection has ended; also the `code` of the errors of `segue.errors`. kv_link: one side closed it,
# and said why. kv_mismatch, kv_key: the workers cannot connect before an option changes. kv_refused: the
# other side refused it. kv_protocol: a frame or message broke the protocol. kv_link_lost: the other worker
# cannot be reached, has ended, or is silent.
LinkCloseCode = Literal["kv_link", "kv_mismatch", "kv_key", "kv_refused", "kv_protocol", "kv_link_lost"]


class LinkOpened(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The handshake is complete: messages may be sent."""

    peer: int
    session: str  # the connection's name on both sides, which never occurs again
    hello: Hello  # the other side's


class LinkMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message came; those of one peer come in the order in which they were sent."""

    peer: int
    message: KVMessage


class LinkClosed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The last event of a peer, exactly one, whether the connection was ever open or not."""

    peer: int
    code: LinkCloseCode
    reason: str  # for people


LinkEvent = LinkOpened | LinkMessage | LinkClosed
