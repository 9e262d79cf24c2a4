"""Where plans come from: the stored tables of measured plans, and the cache of those found at a start.

Both have plans by key (a shape), then by the largest number of rows that a plan serves, then by kind. A plan
is a JSON object whose form its reader knows, or null: there the library's kernel (cuBLAS) is the fastest. A
pure module: it knows nothing of torch or Triton.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from segue.kernels.gemm_plan import DeviceFacts
from segue.logs import logger

Plans = dict[str, dict[str, dict[str, Any]]]
"""Plans by key, largest number of rows, and kind."""

_SAME_MEMORY = 0.05  # devices whose memories differ by at most this share are of one class
_VERSION = 1  # of the form of the cache file
_LOCK_POLL_S = 0.1  # between two tries for a lock that another process holds


_found: Plans = {}  # plans that starts in this process have found or read, see `add_found_plans`


def found_plans() -> Plans:
    """Returns the plans for shapes that no stored table has; what depends on them may be cached."""
    return _found


def add_found_plans(plans: Plans) -> None:
    """Add to `found_plans`."""
    merged = merge(_found, plans)
    _found.clear()
    _found.update(merged)


@cache
def stored_plans(table: Path, device: DeviceFacts, *, any_size: bool = False) -> dict[str, Any]:
    """Returns the plans of a stored table that were measured on a device like this one; {} if there are none.

    Such a device has the same compute capability, as many SMs, and as much memory, which stands for its
    bandwidth. Its name does not matter. With `any_size` the compute capability is enough.
    """
    tables: list[dict[str, Any]] = json.loads(table.read_text()) if table.exists() else []
    return next((each["plans"] for each in tables if _is_like(each, device, any_size=any_size)), {})


def lookup(sources: Iterable[tuple[Plans, str]], key: str, num_rows: int) -> dict[str, Any] | None:
    """Returns the plan of the first source that knows the GEMM, or None to use the library.

    Args:
        sources: plans, and the kind to look for in them.
        key: of the shape.
        num_rows: a plan serves up to the number of rows that it is stored for.
    """
    for plans, kind in sources:
        serving = (by_kind for max_rows, by_kind in plans.get(key, {}).items() if num_rows <= int(max_rows))
        if kind in (by_kind := next(serving, {})):  # a kind that only more rows have is not for these
            found: dict[str, Any] | None = by_kind[kind]
            return found
    return None


def table_of(tables: list[dict[str, Any]], device: DeviceFacts) -> dict[str, Any]:
    """Returns the plans in `tables` that belong to a device, to be changed; adds a table if there is none."""
    for each in tables:
        if _is_like(each, device):
            plans: dict[str, Any] = each["plans"]
            return plans
    plans = {}
    tables.append(
        {
            "capability": capability_text(device),
            "num_sms": device.num_sms,
            "memory_gib": round(device.memory_bytes / 2**30),
            "device": device.name,
            "plans": plans,
        }
    )
    return plans


def capability_text(device: DeviceFacts) -> str:
    """Returns the compute capability as the tables name it, such as `9.0` for Hopper."""
    return "{}.{}".format(*device.capability)


def _is_like(table: Mapping[str, Any], device: DeviceFacts, *, any_size: bool = False) -> bool:
    memory = device.memory_bytes / 2**30
    is_equal = (
        table["num_sms"] == device.num_sms
        and abs(float(table["memory_gib"]) - memory) <= _SAME_MEMORY * memory
    )
    return table["capability"] == capability_text(device) and (any_size or is_equal)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCache:
    """The plans that were found at starts on one kind of device with one set of versions, in one file.

    The file's name is a digest of all that decides which plan is the fastest, so another device, another
    version of torch or Triton, or other kernels have another file. Engines may read and write it at the same
    time: it is replaced as a whole, with what others have added meanwhile.
    """

    path: Path
    identity: dict[str, Any]  # what the digest is of, for people who read the file

    @staticmethod
    def of(directory: Path, device: DeviceFacts, versions: Mapping[str, str]) -> PlanCache:
        """Returns the cache for a device in a directory; `versions` are of whatever makes the kernels."""
        identity = {
            "version": _VERSION,
            "capability": capability_text(device),
            "num_sms": device.num_sms,
            "device": device.name,
            "versions": dict(sorted(versions.items())),
        }
        return PlanCache(path=directory / "plans" / f"{_digest(identity)}.json", identity=identity)

    def load(self) -> Plans:
        """Returns the plans; {} if there are none yet, or if the file cannot be read or is damaged."""
        try:
            found = json.loads(self.path.read_text())
            plans: Plans = found["plans"]
            if found["digest"] != _digest(self.identity, plans):
                raise ValueError("its digest is another one")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged, its plans are measured again: %r", self.path, error)
            return {}
        return plans

    @contextmanager
    def measuring(self, timeout_s: float) -> Iterator[None]:
        """Let one engine of this host measure at a time, so that engines that start together measure once.

        The others wait, at most `timeout_s`, and should `load` afterwards. Without a lock, as on a file
        system that has none or after the timeout, the block runs all the same.
        """
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                path = self.path.with_name(f".{self.path.name}.measuring")
                lock = stack.enter_context(path.open("a"))
                deadline = time.monotonic() + timeout_s
                while not _try_lock(lock) and time.monotonic() < deadline:
                    time.sleep(_LOCK_POLL_S)
            except OSError as error:
                logger.debug("%s: engines that start together measure each for itself: %s", self.path, error)
            yield

    def add(self, plans: Plans) -> Plans:
        """Add plans to the file and return all of them; what cannot be written is only logged.

        Of two plans for the same GEMM the new one is kept.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (self.path.parent / f".{self.path.name}.lock").open("a") as lock:
                with suppress(OSError):  # a file system without locks: writers may lose each other's plans
                    fcntl.flock(lock, fcntl.LOCK_EX)
                found = merge(self.load(), plans)
                temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
                digest = _digest(self.identity, found)
                content = {"identity": self.identity, "digest": digest, "plans": found}
                temporary.write_text(json.dumps(content, indent=1))
                temporary.replace(self.path)
            return found
        except OSError as error:
            logger.warning(
                "%s cannot be written, so the next start measures its plans again: %s. Give --cache-dir a "
                "directory that can be written",
                self.path,
                error,
            )
        return plans


def _try_lock(file: TextIO) -> bool:
    """Whether this process has the lock of an open file now; raises OSError if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def merge(first: Plans, second: Plans) -> Plans:
    """Returns the plans of both, and of two for the same GEMM that of `second`; rows are ascending."""
    found: Plans = {}
    for plans in (first, second):
        for key, by_rows in plans.items():
            for rows, by_kind in by_rows.items():
                found.setdefault(key, {}).setdefault(rows, {}).update(by_kind)
    return {
        key: dict(sorted(by_rows.items(), key=lambda each: int(each[0]))) for key, by_rows in found.items()
    }


def without_plans(places: Iterable[tuple[str, str, str]]) -> Plans:
    """Returns plans by which GEMMs with these keys, numbers of rows and kinds are left to the library.

    Otherwise a plan that serves more rows would serve them, too.
    """
    found: Plans = {}
    for key, rows, kind in places:
        found.setdefault(key, {}).setdefault(rows, {})[kind] = None
    return found


def _digest(*values: object) -> str:
    """Returns a digest of values that JSON can express."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def source_digest(files: Iterable[Path]) -> str:
    """Returns a digest of the contents of source files."""
    digest = sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
