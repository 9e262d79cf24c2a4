"""Builds and loads the kernels, which are the C++ files of this package.

They are compiled once per version of their sources, in a few seconds, into the user's cache. The compiler is
`$CXX`, a command with or without options, or else `c++`. Without one, or on another CPU, the engine uses
torch's operators. For an image, `python -m segue.kernels.cpu.build` compiles them into the installed package.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from segue.logs import logger

_DIRECTORY = Path(__file__).parent
_SOURCES = [
    _DIRECTORY / f"{name}.cpp" for name in ("decode_attention", "gemm", "layers", "prefill_attention")
]
# The instructions that the kernels use, and no others that this machine may have: another machine may share
# the cache. A CPU with AVX512-BF16 has all of them.
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    *("-mamx-tile", "-mamx-bf16"),  # which the kernels use only if they are told that the CPU has it
)
_COMPILE_S = 120.0
_POINTER, _SIZE = c_void_p, c_int64
_ARGUMENTS = {
    "gemm": [*[_POINTER] * 4, *[_SIZE] * 3, *[c_int] * 4],
    "add_rms_norm": [*[_POINTER] * 4, _SIZE, _SIZE, c_float],
    "norm_rope_store": [_POINTER, _POINTER, c_float, *[_POINTER] * 5, *[_SIZE] * 4],
    "silu_mul": [_POINTER, _POINTER, _SIZE, _SIZE],
    "decode_attention": [
        *(_POINTER, _SIZE, *[_POINTER] * 3, _SIZE, *[_POINTER] * 3, *[_SIZE] * 6, c_float, c_int)
    ],
    "prefill_attention": [
        *(_POINTER, _SIZE, *[_POINTER] * 3, _SIZE, *[_POINTER] * 4, *[_SIZE] * 7, c_float, c_int)
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The loaded library, or why there is none: one clause."""

    library: ctypes.CDLL | None = None
    why_not: str = ""
    tiles: bool = False  # whether this process may use AMX, the CPU's instructions for tiles of matrices


@cache
def kernels() -> Kernels:
    """Return the kernels of this machine. The first call may compile them, and says so in the log."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx512_bf16_supported():
        return Kernels(why_not="the CPU has no AVX512-BF16")
    try:
        library = _load()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).rstrip(".")
        if not isinstance(error, subprocess.SubprocessError):
            reason += "; set XDG_CACHE_HOME to a directory whose files can be written and executed"
        logger.warning("the CPU's kernels are not used, so steps take up to twice as long: %s", reason)
        return Kernels(why_not=f"the CPU's kernels cannot be built: {reason}")
    return Kernels(library=library, tiles=_may_use_tiles())


def _may_use_tiles() -> bool:
    """Ask the operating system for the use of AMX, if the CPU has it."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def _file_name() -> str:
    """Return a name that is another one for other sources or flags."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for file in (*sorted(_DIRECTORY.glob("*.h")), *_SOURCES):
        digest.update(file.read_bytes())
    return f"cpu-{digest.hexdigest()[:16]}.so"


def _load() -> ctypes.CDLL:
    """Load the library beside its sources, as in an image, or else the one in the user's cache.

    If neither can be loaded, it is compiled into the cache: it may be missing, damaged, or made for a newer C
    library, on a machine that shares the cache.

    Raises:
        OSError: the cache cannot be written, or its files cannot be executed.
        RuntimeError: the user has no home directory.
        subprocess.SubprocessError: there is no compiler, or it failed.
    """
    with suppress(OSError):
        return load(_DIRECTORY / _file_name())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(cache_home) / "segue" / "kernels"
    with suppress(OSError):
        return load(directory / _file_name())
    return load(compile_into(directory))


def load(file: Path) -> ctypes.CDLL:
    """Load a compiled library, and return it with the types of its functions.

    Raises:
        OSError: there is no such file, or it cannot be executed here.
    """
    library = ctypes.CDLL(str(file))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def compile_into(directory: Path) -> Path:
    """Compile the kernels into `directory`, and return the file.

    Raises:
        OSError: the directory cannot be written.
        subprocess.SubprocessError: there is no compiler, or it failed.
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if not compiler or shutil.which(compiler[0]) is None:
        raise subprocess.SubprocessError(
            f"there is no C++ compiler {shlex.join(compiler)!r}; install g++, or set CXX to another one"
        )
    logger.info("compiling the CPU's kernels with %s, once", shlex.join(compiler))
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _file_name()
    with TemporaryDirectory(prefix=".cpu-", dir=directory) as temporary:
        made = Path(temporary) / target.name
        _run([*compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES)])
        with made.open("rb") as file:
            os.fsync(file.fileno())  # or a crash may leave a shorter file, and to load that ends the process
        made.replace(target)
    return target


def _run(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        subprocess.SubprocessError: it failed; says why in its own words, or that it did not end.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as driver:
        try:
            _, told = driver.communicate(timeout=_COMPILE_S)
        except BaseException as error:
            os.killpg(driver.pid, signal.SIGKILL)  # also its children, which do the work
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.SubprocessError(
                    f"{command[0]} did not end within {_COMPILE_S:g} s; set CXX to another compiler"
                ) from error
            raise
    if driver.returncode:
        failed = subprocess.CalledProcessError(driver.returncode, command)
        raise subprocess.SubprocessError(told.strip()[-500:] or str(failed))


if __name__ == "__main__":
    print(compile_into(_DIRECTORY))
