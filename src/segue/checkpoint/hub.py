"""Fetches a model from the Hugging Face hub, or from the hub's local cache if the model is there."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from segue.checkpoint.model_files import current, raise_if_cancelled
from segue.errors import ModelFileError
from segue.logs import logger, writes_json

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_QUANTIZATION = re.compile(r"[A-Za-z0-9_]+")
MAIN = "main"  # the branch of a model that names no revision
_POLL_S = 0.1
_CHILD = (
    "import sys, huggingface_hub; "
    "print(huggingface_hub.snapshot_download("
    "sys.argv[1], revision=sys.argv[2] or None, allow_patterns=sys.argv[3:]))"
)
_METADATA = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["*.safetensors"]


def is_repository_id(model: str) -> bool:
    """Whether `model` could be a hub id, "name" or "owner/name"."""
    return bool(_REPOSITORY.fullmatch(model)) and not model.startswith(".")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on the hub: a repository or, with a quantization like "Q4_K_M", one GGUF file in it."""

    repository: str
    quantization: str | None

    def __str__(self) -> str:
        return self.repository if self.quantization is None else f"{self.repository}:{self.quantization}"

    def patterns(self, *, weights: bool = True) -> list[str]:
        """Return patterns of the names of its files; those of weights are left out unless ``weights``."""
        if self.quantization is None:
            return [*_METADATA, *(_WEIGHTS if weights else [])]
        # A GGUF file has the configuration too, and repositories spell the quantization in either case.
        spellings = sorted({self.quantization, self.quantization.upper(), self.quantization.lower()})
        return [f"{before}{each}.gguf" for each in spellings for before in ("*[-._/]", "")]


def parse_id(model: str) -> HubId | None:
    """Return the hub id that `model` could be: "name", "owner/name" or "owner/name:QUANTIZATION"."""
    repository, colon, quantization = model.partition(":")
    if not is_repository_id(repository) or (
        colon and not ("/" in repository and _QUANTIZATION.fullmatch(quantization))
    ):
        return None
    return HubId(repository, quantization or None)


def revisions(model: str | None, revision: str | None) -> dict[str, str]:
    """Return the revision by repository: that of `model`, a hub id, or nothing."""
    wanted = None if model is None else parse_id(model)
    return {} if wanted is None or revision is None else {wanted.repository: revision}


def fetch(model: str, *, weights: bool, revision: str | None = None, again: bool = False) -> Path:
    """Return the local directory, or the GGUF file, of the hub id `model`, after fetching what is missing.

    A connection that breaks is resumed. Of a fetch that was ended, the files that are complete stay.

    Args:
        model: as :func:`parse_id` takes it.
        weights: whether to fetch the weights too.
        revision: a branch, a tag or a commit; None: the main branch.
        again: fetch also what is there already.

    Raises:
        ModelFileError: there is no such model, revision or quantization, or the hub cannot be reached and the
            model was never fetched.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    wanted = parse_id(model)
    assert wanted is not None, model
    patterns = wanted.patterns(weights=weights)
    given: dict[str, Any] = {} if revision is None else {"revision": revision}
    if again:
        given["force_download"] = True
    if not sys.stderr.isatty() or writes_json():
        disable_progress_bars()
    if current.get().is_cancelled is not None:  # a weight update, which can be discarded meanwhile
        return _files_of(wanted, _fetch_in_child(wanted.repository, revision, patterns), given)
    if again or cached(model, revision, weights=weights) is None:
        logger.info("fetching %s from the Hugging Face hub", model)
    try:
        found = huggingface_hub.snapshot_download(wanted.repository, allow_patterns=patterns, **given)
    except RevisionNotFoundError as error:
        raise ModelFileError(
            f"model {wanted.repository!r} has no revision {revision!r} on the Hugging Face hub; give a "
            "branch, a tag or a commit of it"
        ) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 404)
        if status == 429 or status >= 500:
            raise ModelFileError(
                f"model {model!r} cannot be fetched now: the Hugging Face hub answered {status}. "
                f"Files that are complete stay: `segue models pull {model}` fetches the others"
            ) from error
        raise ModelFileError(
            f"model {model!r} is neither a local file or directory nor available on the Hugging Face hub "
            f"({_first_line(error)}). Check the name; for a private or gated model, log in with `hf auth "
            "login`"
        ) from error
    except (OSError, ValueError) as error:
        raise _unreachable(model, error) from error
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # of the client that the library uses
            raise
        raise _unreachable(model, error) from error
    return _files_of(wanted, Path(found), given)


def cached(model: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """Return what :func:`fetch` would, from the local cache alone; None if it is not there completely."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = parse_id(model)
    assert wanted is not None, model
    given: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        found = huggingface_hub.snapshot_download(
            wanted.repository, allow_patterns=wanted.patterns(weights=weights), local_files_only=True, **given
        )
        return _files_of(wanted, Path(found), given, asks=False)
    except (LocalEntryNotFoundError, ModelFileError):
        return None


def cache_directory() -> Path:
    """Return the directory of the hub's local cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _fetch_in_child(model: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch in a child process, which can be killed: a download within this process cannot be cancelled.

    `patterns`: of the names of the files to fetch. The child prints the local directory as its last line.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, model, revision or "", *patterns],
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


def _files_of(wanted: HubId, directory: Path, given: dict[str, Any], *, asks: bool = True) -> Path:
    """Return the fetched directory or, for a quantization, the one GGUF file in it.

    ``asks``: for a clearer error, the hub may be asked which files there are.

    Raises:
        ModelFileError: there is no such file, or several; or the directory is no model.
    """
    if wanted.quantization is None:
        if (directory / "config.json").exists():
            return directory
        names = _gguf_names(wanted, directory, given, asks)
        if not names:
            return directory  # whoever opens it says what is missing
        raise ModelFileError(
            f"model {wanted.repository!r} has no config.json but GGUF files: name one of them by its "
            f"quantization, as {wanted.repository}:Q4_K_M; there are {', '.join(names)}"
        )
    patterns = wanted.patterns()
    found = sorted(
        path
        for path in directory.rglob("*.gguf")
        if any(fnmatchcase(str(path.relative_to(directory)), pattern) for pattern in patterns)
    )
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelFileError(
            f"model {str(wanted)!r} could be any of {', '.join(path.name for path in found)} in {directory}; "
            "give the path of one of them"
        )
    names = _gguf_names(wanted, directory, given, asks)
    raise ModelFileError(
        f"model {wanted.repository!r} has no GGUF file of quantization {wanted.quantization!r}; it has "
        + (", ".join(names) or "none at all")
    )


def _gguf_names(wanted: HubId, directory: Path, given: dict[str, Any], asks: bool) -> list[str]:
    """Return the names of a repository's GGUF files; of those that are here, if the hub is not asked."""
    import huggingface_hub

    names = [str(path.relative_to(directory)) for path in directory.rglob("*.gguf")]
    if asks:
        with suppress(Exception):  # of any kind: the names only make an error clearer
            names = huggingface_hub.list_repo_files(wanted.repository, revision=given.get("revision"))
    return sorted(name for name in names if name.endswith(".gguf"))


def _unreachable(model: str, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"model {model!r} is no local file or directory, and the Hugging Face hub cannot be reached to "
        f"fetch it ({_first_line(error)}). Give the path of a model directory or GGUF file, or fetch the "
        f"model with `segue models pull {model}` while there is a network"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
