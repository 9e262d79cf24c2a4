"""Bodies of the native API, SGLang's ``/generate``. Unknown fields are ignored: clients send extras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from segue.api.validation import TokenId
from segue.errors import UnsupportedFieldError

RULES = {
    "text": "a string or a list of strings",
    "input_ids": "a list of token ids or a list of such lists",
    "rid": "a string or a list of strings",
    "stop": "a string or a list of strings",
    "sampling_params": "an object or a list of objects",
}
# Known fields that would change the output and are not implemented: refused unless empty.
UNSUPPORTED_FIELDS = (
    "audio_data",
    "custom_logit_processor",
    "image_data",
    "input_embeds",
    "lora_path",
    "return_hidden_states",
    "session_params",
    "token_ids_logprob",
    "video_data",
)
UNSUPPORTED_SAMPLING = ("ebnf", "json_schema", "regex", "stop_regex", "structural_tag")
# OpenAI's field names to those used here, for errors found later.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
}


class NativeSampling(Struct, frozen=True, kw_only=True):
    """``sampling_params``."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[TokenId, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1


class NativeGenerate(Struct, frozen=True, kw_only=True):
    """``POST /generate``; lists are batches."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None  # all items of one type
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    rid: str | list[str] | None = None
    priority: int = 0


def refuse_unsupported(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise UnsupportedFieldError for a known field that is set, but not implemented."""
    for name in names:
        if body.get(name):
            raise UnsupportedFieldError(f"{name} is not supported; leave it out", param=name)
