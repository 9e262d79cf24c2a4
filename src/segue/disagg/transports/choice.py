"""What each kind of transport can do, and which kinds a rank offers; the two ends of a link agree on one."""

from __future__ import annotations

from dataclasses import dataclass

from segue.config import TransportChoice
from segue.errors import ConfigError
from segue.extras import NIXL


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportTraits:
    """What a kind of transport needs, and what it knows of writers."""

    devices: frozenset[str]  # types of the devices whose memory it moves
    one_host: bool  # both workers must run on one host
    peer_access: bool  # the writer's GPU must be able to write to the reader's
    in_pieces: bool  # heads of several ranks come as pieces (`segue.disagg.layout`), to be put in order
    # It knows when a writer whose connection is lost can write no more. Pages that a writer of another kind
    # may still write to are not used for `segue.disagg.lease.LOST_S` seconds.
    proves_gone: bool


# The best first.
TRAITS: dict[str, TransportTraits] = {
    "shm": TransportTraits(
        devices=frozenset({"cpu"}), one_host=True, peer_access=False, in_pieces=False, proves_gone=True
    ),
    "cuda_ipc": TransportTraits(
        devices=frozenset({"cuda"}), one_host=True, peer_access=True, in_pieces=False, proves_gone=True
    ),
    "nixl": TransportTraits(
        devices=frozenset({"cpu", "cuda"}),
        one_host=False,
        peer_access=False,
        in_pieces=True,
        proves_gone=False,
    ),
}


def kinds_to_offer(choice: TransportChoice, device: str, *, has_key: bool, has_nixl: bool) -> list[str]:
    """Return the kinds that a rank on a type of device offers for `--pd-transport`, the best first.

    NIXL's ports accept connections from anywhere, so `auto` opens them only where another host can be
    connected at all: with a key.

    Raises:
        ConfigError: the chosen kind does not move KV of this device.
    """
    possible = [kind for kind, traits in TRAITS.items() if device in traits.devices]
    if choice != "auto" and choice not in possible:
        raise ConfigError(
            f"--pd-transport {choice} does not move KV of --device {device}; use auto, or one of "
            f"{', '.join(possible)}",
            param="pd_transport",
        )
    refused = kinds_to_withhold(choice, device, has_key=has_key, has_nixl=has_nixl)
    return [kind for kind in TRAITS if kind not in refused]


def kinds_to_withhold(
    choice: TransportChoice, device: str, *, has_key: bool, has_nixl: bool
) -> dict[str, str]:
    """Return the kinds that a rank does not offer, each with the reason and, where there is one, the remedy.

    The arguments are those of `kinds_to_offer`.
    """
    refused = {}
    for kind, traits in TRAITS.items():
        if device not in traits.devices:
            refused[kind] = f"it does not move KV of --device {device}"
        elif choice not in ("auto", kind):
            refused[kind] = f"--pd-transport names {choice}"
        elif choice == "auto" and not traits.one_host:
            needs = [*([] if has_nixl else [NIXL.remedy]), *([] if has_key else ["give --pd-key"])]
            if needs:
                refused[kind] = f"its ports are opened only with NIXL and a key: {', and '.join(needs)}"
    return refused
