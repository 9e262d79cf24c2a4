"""Fetching a model from the Hugging Face hub, or from its local cache when that has it."""

import re
from pathlib import Path

from segue.errors import ModelFileError

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_METADATA = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["*.safetensors"]


def is_repository_id(model: str) -> bool:
    """Whether `model` could be a hub id, "name" or "owner/name"."""
    return bool(_REPOSITORY.fullmatch(model)) and not model.startswith(".")


def fetch(model: str, *, weights: bool) -> Path:
    """The local directory with the files of `model`, with `weights` or without, fetched if not there.

    Raises:
        ModelFileError: there is no such model, or the hub cannot be reached and the model was never fetched.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_METADATA, *(_WEIGHTS if weights else [])]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except HfHubHTTPError as error:
        raise ModelFileError(
            f"model {model!r} is neither a local file or directory nor available on the Hugging Face hub "
            f"({_first_line(error)}). Check the name; for a private or gated model, log in with `hf auth "
            "login`"
        ) from error
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelFileError(
            f"model {model!r} is no local file or directory, and the Hugging Face hub cannot be reached to "
            f"fetch it ({_first_line(error)}). Give the path of a model directory or GGUF file, or fetch it "
            f"with `hf download {model}` while there is a network"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
