"""Fetches a model from the Hugging Face hub, or from the hub's local cache if the model is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from segue.checkpoint.model_files import current, raise_if_cancelled
from segue.errors import ModelFileError

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_POLL_S = 0.1
_CHILD = (
    "import sys, huggingface_hub; "
    "print(huggingface_hub.snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:]))"
)
_METADATA = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["*.safetensors"]


def is_repository_id(model: str) -> bool:
    """Whether `model` could be a hub id, "name" or "owner/name"."""
    return bool(_REPOSITORY.fullmatch(model)) and not model.startswith(".")


def fetch(model: str, *, weights: bool, revision: str | None = None) -> Path:
    """Return the local directory with the files of `model`, after fetching those that are missing.

    `weights`: whether to fetch the weights too. `revision`: a branch, tag or commit; None: the main branch.

    Raises:
        ModelFileError: there is no such model or revision, or the hub cannot be reached and the model was
            never fetched.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

    patterns = [*_METADATA, *(_WEIGHTS if weights else [])]
    if current.get().is_cancelled is not None:  # a weight update, which can be discarded meanwhile
        assert revision is None, "weight updates name none"
        return _fetch_in_child(model, patterns)
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except RevisionNotFoundError as error:
        raise ModelFileError(
            f"revision={revision!r}: model {model!r} on the Hugging Face hub has no such branch, tag or "
            "commit; look at its files there, or leave --revision out"
        ) from error
    except HfHubHTTPError as error:
        raise ModelFileError(
            f"model {model!r} is neither a local file or directory nor available on the Hugging Face hub "
            f"({_first_line(error)}). Check the name; for a private or gated model, log in with `hf auth "
            "login`"
        ) from error
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelFileError(
            f"model {model!r} is no local file or directory, and the Hugging Face hub cannot be reached to "
            f"fetch it ({_first_line(error)}). Give the path of a model directory or GGUF file, or fetch the "
            f"model with `hf download {model}` while there is a network"
        ) from error


def cache_directory() -> Path:
    """Return the directory of the hub's local cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _fetch_in_child(model: str, patterns: list[str]) -> Path:
    """Fetch in a child process, which can be killed: a download within this process cannot be cancelled.

    `patterns`: of the names of the files to fetch. The child prints the local directory as its last line.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, model, *patterns],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    ) as child:
        try:
            while True:
                try:
                    output, errors = child.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    raise_if_cancelled()
        finally:
            child.kill()
    if child.returncode != 0:
        reason = next(iter(reversed(errors.strip().splitlines())), "the download process gave no reason")
        raise ModelFileError(
            f"model {model!r} cannot be fetched from the Hugging Face hub ({reason[:300]}). Check the name "
            "and the network; for a private or gated model, log in with `hf auth login` where the server runs"
        )
    return Path(output.splitlines()[-1])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
