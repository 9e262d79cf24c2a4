"""Builds and loads the kernels, `kernels.cpp`.

They are compiled once per version of their source, in a few seconds, into the user's cache. The compiler is
`$CXX`, or else `c++`. Without one, or on another CPU, the engine uses torch's operators. For an image,
`python -m segue.kernels.cpu.build` compiles them into the installed package.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from segue.logs import logger

SOURCE = Path(__file__).parent / "kernels.cpp"
# The instructions that the kernels use, and no others that this machine may have: another machine may share
# the cache. A CPU with AVX512-BF16 has all of them.
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
_COMPILE_S = 120.0
_POINTER, _SIZE = c_void_p, c_int64
_ARGUMENTS = {
    "gemm": [*[_POINTER] * 4, *[_SIZE] * 3, c_int, c_int],
    "add_rms_norm": [*[_POINTER] * 4, _SIZE, _SIZE, c_float],
    "norm_rope_store": [_POINTER, _POINTER, c_float, *[_POINTER] * 5, *[_SIZE] * 4],
    "silu_mul": [_POINTER, _POINTER, _SIZE, _SIZE],
    "decode_attention": [_POINTER, _SIZE, *[_POINTER] * 3, _SIZE, *[_POINTER] * 3, *[_SIZE] * 6, c_float],
    "prefill_attention": [_POINTER, _SIZE, *[_POINTER] * 3, _SIZE, *[_POINTER] * 4, *[_SIZE] * 7, c_float],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The loaded library, or why there is none: one clause."""

    library: ctypes.CDLL | None = None
    why_not: str = ""


@cache
def kernels() -> Kernels:
    """Return the kernels of this machine. The first call may compile them, and says so in the log."""
    if platform.machine() != "x86_64" or not torch.cpu._is_avx512_bf16_supported():
        return Kernels(why_not="the CPU has no AVX512-BF16")
    try:
        library = ctypes.CDLL(str(_find()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()[-500:]
        logger.warning("the CPU's kernels are not used, so steps take up to twice as long: %s", reason)
        return Kernels(why_not=f"the CPU's kernels cannot be built: {reason}")
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return Kernels(library=library)


def _file_name() -> str:
    """Return a name that is another one for another source or other flags."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    return f"cpu-{digest}.so"


def _find() -> Path:
    """Return the library beside its source, as in an image, or else in the user's cache, made if need be.

    Raises:
        OSError: there is no compiler, or the cache cannot be written.
        subprocess.SubprocessError: the compiler failed.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(cache_home) / "segue" / "kernels"
    for each in (SOURCE.parent, directory):
        if (each / _file_name()).exists():
            return each / _file_name()
    return compile_into(directory)


def compile_into(directory: Path) -> Path:
    """Compile the kernels into `directory`, and return the file.

    Raises:
        OSError: there is no compiler, or the directory cannot be written.
        subprocess.SubprocessError: the compiler failed.
    """
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise FileNotFoundError(
            f"there is no C++ compiler {compiler!r}; install g++, or set CXX to another one"
        )
    logger.info("compiling the CPU's kernels with %s, once", compiler)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _file_name()
    with TemporaryDirectory(prefix=".cpu-", dir=directory) as temporary:
        made = Path(temporary) / target.name
        command = [compiler, *_FLAGS, "-o", str(made), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        made.replace(target)
    return target


if __name__ == "__main__":
    print(compile_into(SOURCE.parent))
