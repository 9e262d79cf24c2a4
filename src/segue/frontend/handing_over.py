"""Which part of a request an engine does, and which requests go on at another engine at all."""

from __future__ import annotations

from dataclasses import dataclass

from segue.bootstrap_hosts import FAKE_HOST, BootstrapHosts
from segue.errors import InvalidRequestError, RoleChangedError, WrongRoleError
from segue.frontend.request import GenerateRequest
from segue.messages.fleet import Role
from segue.messages.requests import Handoff, SamplingParams

# Log-probabilities of a prompt go with its KV, over the connection of all requests of two engines.
MOST_LOGPROB_BYTES = 8 << 20


def goes_on_elsewhere(params: SamplingParams, prompt_len: int) -> bool:
    """Whether a decode engine goes on with what a prefill engine has computed.

    It does not if no token is asked for, nor if the prompt's log-probabilities are too large to be sent.
    """
    if params.max_new_tokens == 0:
        return False
    first = params.prompt_logprobs_start
    num_entries = prompt_len - first if first >= 0 else 0
    return num_entries * (16 + 15 * params.num_prompt_top) <= MOST_LOGPROB_BYTES  # bytes of msgpack


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Says which part of each request this engine does."""

    hosts: BootstrapHosts  # where it may meet other engines
    bootstrap_port: int  # that a request means which names none; 0: it must name one

    def of(self, request: GenerateRequest, *, role: Role, first_role: Role) -> Handoff | None:
        """Return the part of a request; None: all of it. A bootstrap leaves that to the engine's role.

        ``role`` is the engine's, and ``first_role`` that of its start.

        Raises:
            RoleChangedError: the engine hands no KV over any more.
            WrongRoleError: it never has.
            InvalidRequestError: no port is named, or the host is not allowed.
        """
        bootstrap = request.bootstrap
        if bootstrap is None or bootstrap.host == FAKE_HOST:
            if request.handoff is not None and request.handoff.peer:
                self.hosts.check_peer(request.handoff.peer)
            return request.handoff
        if role == "both" and first_role != "both":  # who sends it may not know yet
            raise RoleChangedError(
                f"bootstrap_room={bootstrap.room}: this engine's role has changed to both, so it hands no "
                "KV over any more; send the request to another engine"
            )
        if role == "both":
            raise WrongRoleError(
                f"bootstrap_room={bootstrap.room}: this engine hands no KV over; start it with --role "
                "prefill or --role decode, or leave the bootstrap fields out",
                param="bootstrap_room",
            )
        if role == "prefill":
            return Handoff(id=bootstrap.room, part="prefill")
        host = bootstrap.host.removeprefix("[").removesuffix("]")
        port = bootstrap.port or self.bootstrap_port
        if not port:
            text = (
                "bootstrap_port is missing, and this engine's --disaggregation-bootstrap-port is 0; give it"
            )
            raise InvalidRequestError(text, param="bootstrap_port")
        self.hosts.check(host, port)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return Handoff(id=bootstrap.room, part="decode", peer=address, whole=True)
