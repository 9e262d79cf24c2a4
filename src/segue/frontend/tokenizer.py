"""Tokenizes, detokenizes and renders chat templates as transformers does, without its import of torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend

from segue.checkpoint.gguf.tokenizer import CONVERTED_KEY
from segue.checkpoint.source import eos_token_ids, read_json
from segue.errors import InvalidRequestError, ModelFileError

_GENERIC = "PreTrainedTokenizerFast"
_QWEN = "Qwen2Tokenizer"
_QWEN_MODEL_TYPES = frozenset({"qwen2", "qwen3", "qwen3_moe"})


class Tokenizer:
    """The tokenizer of one model. Several threads may use it; `encode` and `decode` release the GIL."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] = ()) -> None:
        """Wrap a transformers tokenizer that is built on a `tokenizers.Tokenizer`; see `load`."""
        self._chat = tokenizer
        self.backend: Backend = tokenizer.backend_tokenizer
        # A tokenizer.json may enable both; transformers ignores that by default.
        self.backend.no_truncation()
        self.backend.no_padding()
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *own]))  # each ends a generation
        self.bos_id: int | None = tokenizer.bos_token_id
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.has_chat_template = bool(tokenizer.chat_template)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Load the tokenizer of `directory`, and the EOS ids from the configs there.

        Raises:
            ModelFileError: there are no tokenizer files, or they cannot be read.
        """
        import transformers

        settings, config, generation = (
            read_json(path) if (path := directory / f"{name}.json").exists() else {}
            for name in ("tokenizer_config", "config", "generation_config")
        )
        try:
            name = _class_name(directory, settings, config)
            tokenizer = getattr(transformers, name).from_pretrained(directory)
        except Exception as error:  # the Rust and Python parsers raise many types for a broken file
            why = f"cannot be loaded ({_first_line(error)})"
            remedy = (
                "its files are tokenizer.json, tokenizer_config.json and, for older models, tokenizer.model"
            )
            if _lacks_sentencepiece(directory):  # then the error is about a fallback that was tried last
                why = "cannot be loaded: there is no tokenizer.json"
                remedy = (
                    "install sentencepiece and protobuf to read its tokenizer.model, or save the tokenizer "
                    "as a tokenizer.json"
                )
            raise ModelFileError(f"the tokenizer in {directory} {why}; {remedy}") from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelFileError(
                f"the tokenizer in {directory} is a {type(tokenizer).__name__}, which has no fast "
                "implementation; save it as a tokenizer.json"
            )
        return cls(tokenizer, eos_token_ids(config, generation))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Use `add_special_tokens` for plain prompts, not for rendered chats.

        Raises:
            InvalidRequestError: `text` has a lone surrogate, which is not a character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has a lone surrogate, {text[error.start]!a}, at character {error.start}; it must "
                "be valid Unicode"
            ) from error
        # Only the batch call releases the GIL. Without it, a long prompt would block every stream.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`: U+FFFD for bytes that are not UTF-8, "" for ids beyond the vocabulary."""
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Return the prompt for `messages`. `kwargs`, such as `tools`, are passed to the template.

        Raises:
            InvalidRequestError: the model has no chat template, or its template rejects the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot answer messages; send a prompt to "
                "/v1/completions",
                param="messages",
            )
        try:
            text = self._chat.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {_first_line(error)}",
                param="messages",
            ) from error
        return str(text)


def _class_name(directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the class that AutoTokenizer would choose; itself, which imports torch, where that is hard."""
    declared = settings.get("tokenizer_class")
    if CONVERTED_KEY in settings:
        return _GENERIC
    if "auto_map" in settings or not (directory / "tokenizer.json").exists():
        return "AutoTokenizer"
    is_qwen = config.get("model_type") in _QWEN_MODEL_TYPES
    if declared in (_GENERIC, "TokenizersBackend"):
        # The class that Qwen2 checkpoints declare is known to be wrong.
        return _QWEN if config.get("model_type") == "qwen2" else _GENERIC
    if is_qwen and declared in (None, _QWEN, f"{_QWEN}Fast"):
        return _QWEN
    return "AutoTokenizer"


def _lacks_sentencepiece(directory: Path) -> bool:
    """Whether there is only a tokenizer.model, and a package that is needed to read it is missing."""
    from transformers.utils.import_utils import is_protobuf_available, is_sentencepiece_available

    alone = (directory / "tokenizer.model").exists() and not (directory / "tokenizer.json").exists()
    return alone and not (is_sentencepiece_available() and is_protobuf_available())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
