"""Fields of the generating routes that Segue knows but does not implement, and when they ask for nothing.

Routers and frameworks write out the defaults of the engine that they were made for, so most of these fields
come with the value that they have anyway. :data:`FIELDS` is the one table of them: a value that asks for
nothing is taken, and so is ``null``; any other value is an error that names the field. So a client is never
answered as if it had got what it asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Literal, get_args

from segue.errors import UnsupportedFieldError, short_repr

# chat, completions, responses: the bodies of OpenAI's routes. responses_text, responses_reasoning: the
# objects `text` and `reasoning` in the last one. messages: those of Anthropic's. native: the body of
# `/generate`. sampling: the object `sampling_params` in it. tokens, token_sampling: the same of
# `/inference/v1/generate`. Fields of these last four that are not in the table are ignored, so it lists only
# those that would change the reply.
Place = Literal[
    "chat",
    "completions",
    "responses",
    "responses_text",
    "responses_reasoning",
    "messages",
    "native",
    "sampling",
    "tokens",
    "token_sampling",
]


class _Anything:
    """The values of a field that cannot change the reply, whatever it says."""

    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING = _Anything()
Values = tuple[Any, ...] | _Anything  # besides null

_OFF: tuple[Any, ...] = (False,)
_BOOLEAN = (True, False)
_EMPTY: tuple[Any, ...] = ("", [], {}, False, 0)  # the native API has always taken any of these

_OPENAI: tuple[Place, ...] = ("chat", "completions", "responses")
_BODIES: tuple[Place, ...] = (*_OPENAI, "native")
_ALL: tuple[Place, ...] = get_args(Place)

# Names, the places that they are known in, and the values that ask for nothing.
_ROWS: tuple[tuple[str, tuple[Place, ...], Values], ...] = (
    # Who asks, where it goes, and what is noted of it: nothing that changes a reply.
    ("user store service_tier safety_identifier", _OPENAI, ANYTHING),
    ("metadata", ("chat", "completions"), ANYTHING),  # responses repeat it
    ("prompt_cache_key prompt_cache_retention", _OPENAI, ANYTHING),
    ("prompt_cache_options", ("responses",), ANYTHING),
    ("session_id routing_id routing_key conversation_id custom_labels", _OPENAI, ANYTHING),
    ("log_metrics no_logs", _OPENAI, ANYTHING),
    # This engine has one data-parallel rank, which has the number 0.
    ("data_parallel_rank routed_dp_rank disagg_prefill_dp_rank", _OPENAI, (0,)),
    ("kv_transfer_params ec_transfer_params bootstrap_pair_key decode_tp_size", _OPENAI, ({},)),
    ("extra_key", _BODIES, ("", [])),  # `cache_salt` does the same
    ("background", _BODIES, _OFF),
    # Beam search.
    ("use_beam_search", _OPENAI, _OFF),
    ("beam_width", ("sampling",), (1, 0)),
    ("length_penalty", _OPENAI, (1.0,)),
    ("early_stopping watermarking", _OPENAI, _OFF),
    # Guided output.
    ("structural_tag stop_regex", (*_OPENAI, "sampling"), _EMPTY),
    ("response_format", ("sampling",), ({"type": "text"},)),  # other routes' names of what this one has
    ("structured_outputs", ("sampling",), ({},)),
    ("choice guided_json guided_regex guided_choice guided_grammar", ("sampling",), ()),
    ("logits_processors", _OPENAI, ([],)),
    ("custom_logit_processor", _BODIES, _EMPTY),
    ("custom_params", (*_OPENAI, "sampling"), ({},)),
    ("vllm_xargs", _OPENAI, ({},)),
    ("repetition_detection", _OPENAI, ()),
    # Tools.
    ("functions", ("chat",), ([],)),  # the older names of `tools` and `tool_choice`
    ("function_call", ("chat",), ("none", "auto")),
    # Reasoning.
    ("reasoning", ("chat",), ({},)),
    ("thinking_token_budget", _OPENAI, ()),
    ("require_reasoning", ("native",), _OFF),
    ("max_thinking_tokens", ("native",), ()),
    # The prompt: how it is rendered and tokenized, and what is beside its text.
    ("chat_template", ("chat",), ()),
    ("documents", ("chat",), ([],)),
    ("task input_ids", ("chat",), ()),
    ("echo", ("chat",), _OFF),
    ("suffix", ("completions",), ("",)),
    ("prompt_embeds", ("completions",), ()),
    ("truncate_prompt_tokens", _OPENAI, ()),
    ("truncation_side", _OPENAI, ("left", "right")),  # of a prompt that is not truncated
    ("input_embeds positional_embed_overrides", ("native",), _EMPTY),
    ("image_data audio_data video_data", ("native",), _EMPTY),
    ("mm_processor_kwargs media_io_kwargs images_config", ("chat",), ({},)),
    ("images_config", ("completions",), ({},)),
    ("max_dynamic_patch min_dynamic_patch", ("chat",), ()),
    ("use_audio_in_video", ("chat",), _OFF),
    ("lora_path lora_id", _BODIES, ("", [])),
    ("session_params", _BODIES, ({},)),
    ("ngram_corpus_id", _OPENAI, ("",)),
    # OpenAI's other models.
    ("modalities", ("chat",), (["text"],)),
    ("audio prediction web_search_options", ("chat",), ()),
    ("return_audio", ("chat",), _OFF),
    ("verbosity", ("chat", "responses_text"), ("medium",)),  # OpenAI's default
    # Of responses: what would have to be kept from one to the next, and what the server would have to do.
    ("previous_response_id conversation prompt", ("responses",), ()),
    ("previous_input_messages", ("responses",), ()),
    ("include context_management", ("responses",), ([],)),
    ("truncation", ("responses",), ("disabled",)),
    ("max_tool_calls moderation access_programs image", ("responses",), ()),
    ("summary generate_summary", ("responses_reasoning",), ()),
    ("context", ("responses_reasoning",), ("auto",)),
    ("mode", ("responses_reasoning",), ("standard",)),
    ("top_logprobs", ("responses",), (0,)),
    ("enable_response_messages include_stop_str_in_output", ("responses",), _OFF),
    ("skip_special_tokens", ("responses",), (True,)),
    ("logit_bias structured_outputs mm_processor_kwargs", ("responses",), ({},)),
    # What else the reply should have.
    ("logprob_token_ids", _OPENAI, ()),
    ("token_ids_logprob", ("native",), _EMPTY),
    ("return_hidden_states", _BODIES, _OFF),
    ("return_routed_experts return_indexer_topk return_sampling_mask", _BODIES, _OFF),
    ("routed_experts_start_len routed_experts_prompt_start", _BODIES, (0,)),
    ("return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64", ("native",), _OFF),
    ("return_bytes return_entropy return_prompt_token_ids", ("native",), _OFF),
    ("return_cached_tokens_details return_spec_tokens_details return_meta_info", _OPENAI, _OFF),
    ("return_prompt_token_ids", _OPENAI, _OFF),
    ("return_input_ids_in_sglext return_output_ids_in_sglext", _OPENAI, _OFF),
    ("return_token_offsets return_prompt_text", _OPENAI, _OFF),
    ("return_mm_kwargs", _OPENAI, (True,)),
    ("stream_interval", _OPENAI, (1,)),
    # vLLM's route for token ids.
    ("features content_parts kv_transfer_params ec_transfer_params", ("tokens",), _EMPTY),
    ("output_mode", ("tokens",), ("tokens",)),
    ("length_penalty", ("token_sampling",), (1.0,)),
    ("guided_decoding", ("token_sampling",), _EMPTY),
    ("logits_processors logprob_token_ids prompt_logprob_token_ids", ("token_sampling",), _EMPTY),
    ("prompt_logprob_start truncate_prompt_tokens use_beam_search", ("token_sampling",), _EMPTY),
    ("repetition_detection trace_decode_token_ids watermarking", ("token_sampling",), _EMPTY),
    ("routed_experts_prompt_start thinking_token_budget", ("token_sampling",), _EMPTY),
    # Anthropic's API. Every prompt is cached, so a request to do so asks for nothing.
    (
        "metadata service_tier cache_control inference_geo user_profile_id workspace_id",
        ("messages",),
        ANYTHING,
    ),
    ("speed", ("messages",), ("standard",)),
    ("container diagnostics output_format", ("messages",), ()),
    ("mcp_servers", ("messages",), ([],)),
    ("context_management", ("messages",), ({},)),
    # Only tokenizers of a kind that is not supported put spaces there.
    ("spaces_between_special_tokens", _OPENAI, _BOOLEAN),
)


def _table() -> Mapping[Place, Mapping[str, Values]]:
    """Return the rows by place and name; each name has one row per place."""
    table: dict[Place, dict[str, Values]] = {place: {} for place in _ALL}
    for names, places, values in _ROWS:
        for place in places:
            for name in names.split():
                assert name not in table[place], f"{name} has two rows for {place}"
                table[place][name] = values
    return table


FIELDS = _table()


@lru_cache
def harmless(place: Place) -> frozenset[str]:
    """Return the fields whose value does not matter."""
    return frozenset(name for name, values in FIELDS[place].items() if values is ANYTHING)


@lru_cache
def unsupported(place: Place) -> frozenset[str]:
    """Return the fields that are errors unless they ask for nothing."""
    return frozenset(FIELDS[place]) - harmless(place)


def without_nothing(body: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return a body without the fields of the table.

    Raises:
        UnsupportedFieldError: one of them asks for something.
    """
    table = FIELDS[place]
    rest: dict[str, Any] = {}
    for name, value in body.items():
        values = table.get(name)
        if values is None:
            rest[name] = value
        elif not (value is None or isinstance(values, _Anything) or _is_one_of(value, values)):
            raise _unsupported(name, value, values)
    return rest


def _is_one_of(value: Any, values: Collection[Any]) -> bool:
    """Whether a value of JSON is one of ``values``, of the same type; an integer may stand for a float."""
    kinds = (int, float) if type(value) is int else (type(value),)
    return any(type(each) in kinds and value == each for each in values)


def _unsupported(name: str, value: Any, values: tuple[Any, ...]) -> UnsupportedFieldError:
    only = f", or send {_in_json(values[0])}" if values else ""
    text = f"{name} is not supported, and {_in_json(value)} asks for it; leave it out{only}"
    return UnsupportedFieldError(text, param=name)


def _in_json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else short_repr(value)
