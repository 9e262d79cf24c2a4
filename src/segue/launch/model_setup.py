"""What the options make of a model's files: its names, its tokenizer and template, and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from segue.checkpoint.source import ModelSource, read_json, resolve_model, tokenizer_files
from segue.config import EngineConfig
from segue.errors import ConfigError, InvalidRequestError, ModelFileError
from segue.frontend.sampling_options import RequestLimits, SamplingOptions
from segue.frontend.tokenizer import Tokenizer

MODEL_DEFAULTS = ("temperature", "top_p", "top_k")  # of generation_config.json


def find_model(config: EngineConfig) -> ModelSource:
    """Find the files of --model, and of --tokenizer; raises as :func:`segue.checkpoint.source.resolve`."""
    source = resolve_model(config)
    if config.tokenizer is None:
        return source
    return replace(source, tokenizer_directory=tokenizer_files(config.tokenizer))


def names_of(config: EngineConfig, source: ModelSource) -> list[str]:
    """Return the names of the model that clients are shown; replies have the first one."""
    return config.served_model_names or [source.name]


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    """Load the tokenizer, with the template of --chat-template; None: the model has none.

    Raises:
        ModelFileError: its files cannot be read.
        ConfigError: the template cannot be read, is no template, or there is no tokenizer to use it with.
    """
    template = None if config.chat_template is None else _read_template(config.chat_template)
    if source.tokenizer_directory is None:
        if template is not None:
            text = f"chat_template={config.chat_template!r}: the model has no tokenizer; give --tokenizer too"
            raise ConfigError(text, param="chat_template")
        return None
    tokenizer = Tokenizer.load(source.tokenizer_directory)
    if template is not None:
        try:
            tokenizer.use_template(template)
        except ValueError as error:
            text = f"chat_template={config.chat_template!r}: the file is no template of Jinja ({error})"
            raise ConfigError(text, param="chat_template") from error
    return tokenizer


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        text = f"chat_template={path!r}: the file cannot be read ({error}); give the path of a Jinja template"
        raise ConfigError(text, param="chat_template") from error


def sampling_defaults(
    config: EngineConfig, source: ModelSource, limits: RequestLimits
) -> Mapping[str, float]:
    """Return the sampling options of requests that do not name them, where they are not OpenAI's defaults.

    Raises:
        ModelFileError: the model's generation_config.json has a value that no request may have.
    """
    path = source.directory / "generation_config.json"
    if config.sampling_defaults == "openai" or not path.exists():
        return {}
    given = read_json(path)
    found = {name: given[name] for name in MODEL_DEFAULTS if given.get(name) is not None}
    try:
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
                raise InvalidRequestError(f"{name}={value!r}: must be a number")
        SamplingOptions(**found).check(limits)
    except InvalidRequestError as error:
        raise ModelFileError(
            f"{path}: {error.message}; correct it, or start with --sampling-defaults openai"
        ) from error
    return found
