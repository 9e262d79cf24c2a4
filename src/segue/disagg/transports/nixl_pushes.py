"""Pushes that NIXL carries out: one transfer each, or several where heads are gathered into pieces."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from segue.disagg.transports.nixl_agent import NixlAgent, Transfer
from segue.disagg.transports.nixl_remotes import OpenPool, OpenPools
from segue.disagg.transports.nixl_staging import Staging
from segue.disagg.transports.pusher import PushTarget
from segue.errors import TransportError

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class NixlTarget(PushTarget):
    """A peer's pool, which several peers may have."""

    remote: OpenPool
    staging: Staging | None  # None: whole pages of this rank are sent


@dataclass(slots=True, kw_only=True, eq=False)
class NixlPush:
    """A push, whose pages are computed."""

    ticket: int
    target: NixlTarget
    sources: list[int]
    targets: list[int]
    num_posted: int = 0  # pages
    # Those under way, with the slots of the staging that they read.
    transfers: list[tuple[Transfer, list[int]]] = field(default_factory=list)
    error: TransportError | None = None  # after one, nothing more is posted

    @property
    def has_ended(self) -> bool:
        """Whether nothing is under way, and nothing more will be."""
        is_posted = self.num_posted == len(self.sources)
        return not self.transfers and (is_posted or self.error is not None)


class NixlPushes:
    """The pushes that have not ended; only the agent's thread calls its methods."""

    def __init__(self, agent: NixlAgent, remotes: OpenPools) -> None:
        self._agent = agent
        self._remotes = remotes
        self._running: list[NixlPush] = []

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, push: NixlPush) -> None:
        """Take a push, which `advance` posts."""
        self._running.append(push)

    def advance(self) -> list[NixlPush]:
        """Let NIXL work, and post what can be posted; returns the pushes that have ended, in their order."""
        for push in self._running:
            self._look_after(push)
            if push.error is None:
                self._post(push)
        ended = [push for push in self._running if push.has_ended]
        self._running = [push for push in self._running if not push.has_ended]
        return ended

    def _look_after(self, push: NixlPush) -> None:
        """Find out which transfers have ended; their slots are used again only then."""
        remote, staging = push.target.remote, push.target.staging
        for each in list(push.transfers):
            transfer, slots = each
            try:
                if not self._agent.has_ended(transfer):
                    continue
            except TransportError as error:
                remote.has_failed = True
                push.error = error
            push.transfers.remove(each)
            remote.num_transfers -= 1
            if staging is not None:
                staging.give_back(slots)

    def _post(self, push: NixlPush) -> None:
        """Begin to write the pages that are left, as far as there is room for their pieces."""
        remote, staging = push.target.remote, push.target.staging
        while push.num_posted < len(push.sources):
            sources, slots = push.sources[push.num_posted :], list[int]()
            try:
                pool = self._remotes.reopen(remote)  # a failed connection may read pieces until it is closed
                if staging is not None:
                    slots = sources = staging.gather(sources)
                    if not slots:
                        return
                targets = push.targets[push.num_posted :][: len(sources)]
                staged = None if staging is None else staging.staged
                transfer = self._agent.post(pool, sources, targets, staged)
            except Exception as error:
                self._fail(push, slots, error)
                return
            push.num_posted += len(sources)
            remote.num_transfers += 1
            push.transfers.append((transfer, slots))

    def _fail(self, push: NixlPush, slots: list[int], error: Exception) -> None:
        """Post nothing more of a push; what is under way has to end first."""
        if isinstance(error, TransportError):
            push.target.remote.has_failed = True
            push.error = error
        else:  # no memory of the GPU is left, for example
            logger.exception("a push of %d KV pages failed", len(push.sources))
            push.error = TransportError(f"the push failed: {error!r}")
        if push.target.staging is not None:
            push.target.staging.give_back(slots)
