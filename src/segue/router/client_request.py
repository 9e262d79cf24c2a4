"""What a client has sent, and what all legs of its request have in common."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from segue.messages.leg import Leg, LegKind, LegOutput
from segue.router.fleet import WorkerView
from segue.router.prompts import RequestFacts

# The ids of replies begin as those of an engine's own.
ID_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/chat/completions/tokens": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
    "/inference/v1/generate": "generate-tokens-",
    "/generate": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request of a client. What its reply shows is drawn here, so that every leg shows the same."""

    path: str
    body: bytes
    facts: RequestFacts
    id: str
    created: int  # seconds since 1970
    seed: int  # 63 bits

    @classmethod
    def create(cls, path: str, body: bytes, facts: RequestFacts) -> ClientRequest:
        """Draw the id and the seed of a request."""
        rid = f"{ID_PREFIXES[path]}{secrets.token_hex(16)}"
        seed = secrets.randbits(63)
        return cls(path=path, body=body, facts=facts, id=rid, created=int(time.time()), seed=seed)

    def leg(
        self, kind: LegKind, worker: WorkerView, outputs: list[LegOutput], room: int = 0, peer: str = ""
    ) -> Leg:
        """Returns the message for a worker; ``outputs`` are what the client has already."""
        return Leg(
            path=self.path,
            body=self.body,
            kind=kind,
            epoch=worker.record.epoch,
            id=self.id,
            created=self.created,
            seed=self.seed,
            room=room,
            peer=peer,
            outputs=outputs,
        )
