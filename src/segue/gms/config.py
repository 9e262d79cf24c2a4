"""The options of ``segue gms``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from segue.config import LogLevel
from segue.errors import ConfigError, CUDADriverError
from segue.logs import LogFormat
from segue.memory.memfd import MemfdVMM
from segue.memory.vmm import VMM
from segue.options import (
    CONFIG_FILE,
    Options,
    check_key,
    check_socket_directory,
    option,
    parse_list,
    variable,
)

OnChildExit = Literal["alone", "exit", "restart"]
SERVE_GROUP = "Service"
_service = partial(option, group=SERVE_GROUP)
_place = partial(option, group="Place")


def default_directory() -> str:
    """Return the directory of this user's service."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "segue-gms") if runtime else f"/tmp/segue-gms-{os.getuid()}"


def _check_uids(text: str, name: str) -> None:
    """Raise ConfigError unless a text is a list of user numbers."""
    if not all(part.isdecimal() for part in parse_list(text, name)):
        raise ConfigError(f"{name}={text!r}: expected numbers of users, separated by commas", param=name)


def _check_devices(text: str, name: str) -> None:
    """Raise ConfigError unless a text names devices."""
    parts = parse_list(text, name)
    if text != "all" and not all(part == "cpu" or part.isdecimal() for part in parts):
        rule = "expected all, or cpu and indices of GPUs, separated by commas"
        raise ConfigError(f"{name}={text!r}: {rule}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GmsConfig(Options):
    """The options of the memory service and of what asks it."""

    gms_dir: str = _place(
        default_directory,
        "Directory of the memory service's socket; only its user may write there.",
        check=check_socket_directory,
    )
    gms_token: str | None = _place(
        None, "What clients must send besides being the same user; default: nothing.", check=check_key
    )
    devices: str = _service(
        "all", "Devices to keep memory of: all, or cpu and indices of GPUs, as cpu,0,1.", check=_check_devices
    )
    allow_uid: str | None = _service(
        None, "Numbers of further users whose processes may connect, separated by commas.", check=_check_uids
    )
    on_child_exit: OnChildExit = _service(
        "alone",
        "'alone': run the service without a holder, or with one that was started apart; 'restart': run both "
        "as children, and start what dies again; 'exit': run both, and end when one dies.",
    )
    log_level: LogLevel = _service("info", "Lowest level of messages that are logged.")
    log_format: LogFormat = _service(
        "text", "How lines of the log look: 'text', or 'json': one object per line."
    )

    @property
    def uids(self) -> list[int]:
        """The further users that may connect."""
        return [] if self.allow_uid is None else [int(part) for part in self.allow_uid.split(",")]

    @property
    def child_environment(self) -> dict[str, str]:
        """The options of the supervisor's children, as environment variables."""
        given = {
            "gms_dir": self.gms_dir,
            "devices": self.devices,
            "log_level": self.log_level,
            "log_format": self.log_format,
        }
        optional = {"gms_token": self.gms_token, "allow_uid": self.allow_uid}
        given |= {name: value for name, value in optional.items() if value is not None}
        own = {
            variable("on_child_exit"): "alone",
            CONFIG_FILE: "",
        }  # all of the file's options are here already
        return {variable(name): value for name, value in given.items()} | own


def vmms_of(devices: str) -> Mapping[str, VMM]:
    """Return what makes the slabs of each device: "cpu", or the UUID of a GPU.

    Raises:
        ConfigError: there is no such GPU.
    """
    # Loaded here: a probe, which runs every few seconds, needs the options and no driver.
    from segue.memory.cuda_driver import device_uuids
    from segue.memory.cuda_vmm import CudaVMM

    names = [part.strip() for part in devices.split(",")]
    found: dict[str, VMM] = {}
    if names == ["all"]:
        found["cpu"] = MemfdVMM()
        try:
            uuids = device_uuids()
        except CUDADriverError:  # a machine without a GPU
            uuids = []
        return found | {uuid: CudaVMM(index) for index, uuid in enumerate(uuids)}
    for name in names:
        if name == "cpu":
            found["cpu"] = MemfdVMM()
            continue
        try:
            uuids = device_uuids()
        except CUDADriverError as error:
            raise ConfigError(f"devices={devices!r}: {error.message}", param="devices") from error
        if int(name) >= len(uuids):
            text = f"there are {len(uuids)} GPUs, which count from 0"
            raise ConfigError(f"devices={devices!r}: no GPU {name}; {text}", param="devices")
        found[uuids[int(name)]] = CudaVMM(int(name))
    return found
