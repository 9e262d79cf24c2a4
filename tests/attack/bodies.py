"""The worst known request bodies: at most 16 MiB each, as valid as possible, for any server and model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LIMIT = 16 << 20
ROOM = 4096  # bytes of the limit that are left for the other fields
SLOW_FLOAT = b"9e307"  # 5 bytes that take 10 µs to decode
SLOW_BIAS = b"3e-324"  # a number as slow, and a valid bias


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSizes:
    """The properties of the server that bodies depend on."""

    model: str
    context: int  # tokens
    vocabulary: int  # tokens
    max_prompts: int = 4096


Body = tuple[str, bytes]  # path, content
Builder = Callable[[ServerSizes], Body]
BODIES: dict[str, Builder] = {}

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


def worst(build: Builder) -> Builder:
    """Decorator: registers a builder in ``BODIES`` under its name."""
    BODIES[build.__name__] = build
    return build


def fill(item: bytes, size: int = LIMIT - ROOM) -> bytes:
    """Returns an item repeated as often as it fits in ``size`` bytes."""
    return item * (size // len(item))


def array(item: bytes, size: int = LIMIT - ROOM) -> bytes:
    """Returns a JSON array of one repeated item, of up to ``size`` bytes."""
    return b"[" + fill(item + b",", size)[:-1] + b"]"


def mapping(names: Iterable[int], value: bytes) -> bytes:
    return b"{" + b",".join(b'"%d":%b' % (name, value) for name in names) + b"}"


def with_fields(fields: dict[str, Any], **raw: bytes) -> bytes:
    """Returns a JSON object of ``fields``, which are encoded here, and ``raw``, which are JSON already."""
    parts = [json.dumps({name: value}).encode()[1:-1] for name, value in fields.items()]
    parts += [b'"%b":%b' % (name.encode(), value) for name, value in raw.items()]
    return b"{" + b",".join(parts) + b"}"


def chat(sizes: ServerSizes, **raw: bytes) -> Body:
    fields: dict[str, Any] = {"model": sizes.model, "max_tokens": 1}
    if "messages" not in raw:
        fields["messages"] = [{"role": "user", "content": "a"}]
    return CHAT, with_fields(fields, **raw)


def respond(sizes: ServerSizes, **raw: bytes) -> Body:
    return RESPONSES, with_fields({"model": sizes.model, "max_output_tokens": 1}, **raw)


def complete(sizes: ServerSizes, **raw: bytes) -> Body:
    fields: dict[str, Any] = {"model": sizes.model, "max_tokens": 1}
    if "prompt" not in raw:
        fields["prompt"] = "a"
    return COMPLETIONS, with_fields(fields, **raw)


def generate(**raw: bytes) -> Body:
    fields: dict[str, Any] = {} if "text" in raw or "input_ids" in raw else {"text": "a"}
    if "sampling_params" not in raw:
        fields["sampling_params"] = {"max_new_tokens": 1}
    return GENERATE, with_fields(fields, **raw)


def message(content: bytes) -> bytes:
    return b'[{"role":"user","content":' + content + b"}]"


def id_lists(sizes: ServerSizes, num_prompts: int, size: int) -> bytes:
    """Returns a JSON array of prompts, ``size`` bytes in total, each within the context length."""
    count = max(1, min(size // num_prompts // 2 - 2, sizes.context // 2))
    return array(array(b"1", 2 * count), num_prompts * (2 * count + 2))


# --- conversations ---


@worst
def as_many_blocks_as_are_taken(sizes: ServerSizes) -> Body:
    blocks = array(b'{"type":"text","text":""}', 26 * 65_000)
    return MESSAGES, with_fields({"max_tokens": 1}, messages=b'[{"role":"user","content":%b}]' % blocks)


@worst
def as_many_messages_as_are_taken(sizes: ServerSizes) -> Body:
    pair = b'{"role":"user","content":""},{"role":"assistant","content":""}'
    return MESSAGES, with_fields({"max_tokens": 1}, messages=array(pair, (len(pair) + 1) * 32_700))


@worst
def many_lists_in_the_input_of_a_call(sizes: ServerSizes) -> Body:
    use = b'{"type":"tool_use","id":"1","name":"f","input":{"a":%b}}' % array(b"[]")
    return MESSAGES, with_fields({"max_tokens": 1}, messages=b'[{"role":"assistant","content":[%b]}]' % use)


@worst
def chat_one_message_of_spaces(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=message(b'"' + fill(b" ") + b'"'))


@worst
def chat_one_message_of_escaped_quotes(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=message(b'"' + fill(rb"\"") + b'"'))


@worst
def chat_one_message_of_escaped_emoji(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=message(b'"' + fill(rb"\ud83d\ude00") + b'"'))


@worst
def chat_hundreds_of_thousands_of_empty_messages(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=array(b'{"role":"user","content":""}'))


@worst
def chat_as_many_messages_as_the_context_has_tokens(sizes: ServerSizes) -> Body:
    one = b'{"role":"user","content":""}'
    return chat(sizes, messages=array(one, min(LIMIT - ROOM, (len(one) + 1) * (sizes.context - 1))))


@worst
def chat_tools_of_many_numbers(sizes: ServerSizes) -> Body:
    one = b'{"type":"function","function":{"name":"f","parameters":{"a":%b}}}' % array(SLOW_FLOAT, 60_000)
    return chat(sizes, tools=array(one, 200 * len(one)))


@worst
def chat_calls_with_large_arguments(sizes: ServerSizes) -> Body:
    arguments = b'"{\\"a\\":%b}"' % array(b"[]", 190_000)  # two such calls are the most
    call = b'{"function":{"name":"f","arguments":%b}}' % arguments
    one = b'{"role":"assistant","tool_calls":%b}' % array(call, 4 * len(call))
    return chat(sizes, messages=array(one, 3 * len(one)))


@worst
def chat_messages_that_are_empty_objects(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=array(b"{}"))


@worst
def chat_parts_of_one_message(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=message(array(b'{"type":"text","text":""}')))


@worst
def response_parts_of_one_message(sizes: ServerSizes) -> Body:
    return respond(sizes, input=message(array(b'{"type":"input_text","text":""}')))


@worst
def response_of_many_calls(sizes: ServerSizes) -> Body:
    one = b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'
    return respond(sizes, input=array(one, 25_000 * len(one)))


@worst
def chat_messages_without_parts(sizes: ServerSizes) -> Body:
    return chat(sizes, messages=array(b'{"role":"user","content":[]}'))


@worst
def chat_dropped_metadata_of_lists(sizes: ServerSizes) -> Body:
    return chat(sizes, metadata=array(b"[]"))


@worst
def chat_dropped_user_of_slow_numbers(sizes: ServerSizes) -> Body:
    return chat(sizes, user=array(SLOW_FLOAT))


@worst
def chat_tools_that_are_refused(sizes: ServerSizes) -> Body:
    return chat(sizes, tools=array(b'{"type":"function","function":{}}'))


@worst
def chat_unknown_fields(sizes: ServerSizes) -> Body:
    return CHAT, mapping(range(1_300_000), b"0")


@worst
def chat_one_field_again_and_again(sizes: ServerSizes) -> Body:
    return CHAT, b"{" + fill(b'"seed":0,') + chat(sizes)[1][1:]


# --- prompts ---


@worst
def one_prompt_of_spaces(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=b'"' + fill(b" ") + b'"')


@worst
def one_prompt_of_text(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=b'"' + fill(b"Hello, how are you? ") + b'"')


@worst
def one_prompt_of_sixteen_characters_per_token(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=b'"' + fill(b"a", min(LIMIT - ROOM, 16 * sizes.context)) + b'"')


@worst
def as_many_short_prompts_as_allowed(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=array(b'"a"', 4 * sizes.max_prompts))


@worst
def as_many_short_prompts_as_allowed_streamed(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=array(b'"a"', 4 * sizes.max_prompts), stream=b"true")


@worst
def as_many_long_texts_as_allowed(sizes: ServerSizes) -> Body:
    text = b'"' + fill(b"a", min(LIMIT // sizes.max_prompts - 8, sizes.context // 2)) + b'"'
    return complete(sizes, prompt=array(text, (len(text) + 1) * sizes.max_prompts))


@worst
def as_many_ids_as_fit_in_as_many_prompts_as_allowed(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=id_lists(sizes, sizes.max_prompts, LIMIT - ROOM))


@worst
def millions_of_empty_prompts(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=array(b"[]"))


@worst
def millions_of_empty_texts(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=array(b'""'))


@worst
def one_prompt_of_millions_of_ids(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=array(b"1"))


@worst
def one_prompt_of_slow_numbers(sizes: ServerSizes) -> Body:
    return complete(sizes, prompt=array(SLOW_FLOAT))


# --- options ---


@worst
def the_largest_bias_for_as_many_prompts_as_allowed(sizes: ServerSizes) -> Body:
    count = min(300, sizes.vocabulary)
    biases = mapping(range(count), SLOW_BIAS)
    return complete(sizes, prompt=array(b'"a"', 4 * ((1 << 18) // count)), logit_bias=biases)


@worst
def a_bias_for_the_vocabulary_for_200_prompts(sizes: ServerSizes) -> Body:
    biases = mapping(range(sizes.vocabulary), b"1")
    return complete(sizes, prompt=array(b'"a"', 800), logit_bias=biases)


@worst
def a_bias_for_the_vocabulary_for_200_native_prompts(sizes: ServerSizes) -> Body:
    params = with_fields({"max_new_tokens": 1}, logit_bias=mapping(range(sizes.vocabulary), b"1"))
    return generate(text=array(b'"a"', 800), sampling_params=params)


@worst
def a_bias_of_slow_numbers_for_the_vocabulary(sizes: ServerSizes) -> Body:
    biases = mapping(range(min(sizes.vocabulary, 1 << 18)), SLOW_BIAS)
    return generate(sampling_params=with_fields({"max_new_tokens": 1}, logit_bias=biases))


@worst
def a_bias_of_more_than_a_million_entries(sizes: ServerSizes) -> Body:
    return generate(sampling_params=with_fields({}, logit_bias=mapping(range(1_300_000), b"1")))


@worst
def stop_token_ids_again_and_again(sizes: ServerSizes) -> Body:
    return complete(sizes, stop_token_ids=array(b"1"))


@worst
def as_many_stop_token_ids_as_allowed(sizes: ServerSizes) -> Body:
    return complete(sizes, stop_token_ids=array(b"1", 2 << 18))


@worst
def stop_strings_by_the_million(sizes: ServerSizes) -> Body:
    return complete(sizes, stop=array(b'"ab"'))


@worst
def stop_strings_of_megabytes(sizes: ServerSizes) -> Body:
    return complete(sizes, stop=array(b'"' + b"a" * (LIMIT // 66) + b'"', LIMIT * 64 // 66 + 400))


@worst
def options_for_each_of_as_many_prompts_as_allowed(sizes: ServerSizes) -> Body:
    params = (
        b'{"max_new_tokens":1,"temperature":0.%d,"stop":["%d","b"],"logit_bias":{"1":1,"2":1}}'
        % (each + 1, each)
        for each in range(sizes.max_prompts)
    )
    return generate(
        text=array(b'"a"', 4 * sizes.max_prompts), sampling_params=b"[" + b",".join(params) + b"]"
    )


@worst
def options_by_the_million(sizes: ServerSizes) -> Body:
    return generate(sampling_params=array(b"{}"))


@worst
def request_ids_by_the_million(sizes: ServerSizes) -> Body:
    return generate(rid=array(b'"ab"'))


@worst
def log_probabilities_of_as_many_prompts_as_allowed(sizes: ServerSizes) -> Body:
    params = json.dumps({"max_new_tokens": 4, "ignore_eos": True}).encode()
    return generate(
        input_ids=array(b"[1,2,3]", 8 * sizes.max_prompts),
        sampling_params=params,
        return_logprob=b"true",
        top_logprobs_num=b"20",
        logprob_start_len=b"0",
    )


# --- what is ignored ---


@worst
def an_ignored_field_of_lists(sizes: ServerSizes) -> Body:
    return generate(extra=array(b"[]"))


@worst
def an_ignored_field_of_slow_numbers(sizes: ServerSizes) -> Body:
    return generate(extra=array(SLOW_FLOAT))


@worst
def an_ignored_field_of_nested_lists(sizes: ServerSizes) -> Body:
    return generate(extra=array(b"[" * 200 + b"]" * 200))


@worst
def ignored_fields_by_the_million(sizes: ServerSizes) -> Body:
    return GENERATE, mapping(range(1_300_000), b"0")[:-1] + b"," + generate()[1][1:]


@worst
def an_integer_of_millions_of_digits(sizes: ServerSizes) -> Body:
    return generate(priority=fill(b"1"))


@worst
def spaces_between(sizes: ServerSizes) -> Body:
    return generate(extra=fill(b" ") + b"1")


# --- control ---


@worst
def names_of_a_million_tensors(sizes: ServerSizes) -> Body:
    bucket = with_fields({"dtypes": [], "shapes": []}, names=array(b'"model.w"', LIMIT // 2))
    return "/prepare_weights_update", with_fields(
        {"num_buckets": 1, "group_name": "g"}, buckets=b"[" + bucket + b"]"
    )


@worst
def as_many_tensors_as_allowed(sizes: ServerSizes) -> Body:
    count = 1 << 17
    bucket = with_fields(
        {},
        names=b"[" + b",".join(b'"model.%d"' % each for each in range(count)) + b"]",
        dtypes=array(b'"bfloat16"', 11 * count),
        shapes=array(b"[64,64]", 8 * count),
    )
    checksums = b"{" + b",".join(b'"model.%d":%d' % (each, 1 << 63) for each in range(count)) + b"}"
    fields = {"num_buckets": 1, "group_name": "g"}
    return "/prepare_weights_update", with_fields(fields, buckets=b"[" + bucket + b"]", checksums=checksums)


@worst
def buckets_by_the_hundred_thousand(sizes: ServerSizes) -> Body:
    bucket = b'{"names":[],"dtypes":[],"shapes":[]}'
    return "/prepare_weights_update", with_fields(
        {"num_buckets": 1, "group_name": "g"}, buckets=array(bucket)
    )


@worst
def shapes_by_the_million(sizes: ServerSizes) -> Body:
    fields = {"group_name": "g", "names": [], "dtypes": []}
    return "/update_weights_from_distributed", with_fields(fields, shapes=array(b"[]"))


@worst
def names_of_a_million_tensors_in_vllms_form(sizes: ServerSizes) -> Body:
    info = with_fields({"dtype_names": [], "shapes": []}, names=array(b'"model.w"', LIMIT // 2))
    return "/update_weights", with_fields({}, update_info=info)


@worst
def requests_by_the_million_to_abort(sizes: ServerSizes) -> Body:
    return "/abort_requests", with_fields({}, request_ids=array(b'"a"'))


@worst
def a_tensor_of_millions_of_bytes(sizes: ServerSizes) -> Body:
    payloads = b'["' + fill(b"AAAA") + b'"]'
    return "/update_weights_from_tensor", with_fields({}, serialized_named_tensors=payloads)


@worst
def tensors_by_the_million(sizes: ServerSizes) -> Body:
    return "/update_weights_from_tensor", with_fields({}, serialized_named_tensors=array(b'""'))


@worst
def a_request_id_of_megabytes_to_abort(sizes: ServerSizes) -> Body:
    return "/abort_request", with_fields({}, rid=b'"' + fill(b"a") + b'"')


# --- token ids and text ---

TOKENS, TOKENIZE, DETOKENIZE = "/inference/v1/generate", "/tokenize", "/detokenize"


@worst
def token_ids_by_the_million(sizes: ServerSizes) -> Body:
    return TOKENS, with_fields({}, token_ids=array(b"1"))


@worst
def a_prompt_that_is_scored_with_all_alternatives(sizes: ServerSizes) -> Body:
    fields = {"echo": True, "logprobs": 20, "max_tokens": 1, "prompt_logprobs": 20, "return_token_ids": True}
    prompt = array(b"1", 2 * (sizes.context - 2))
    return COMPLETIONS, with_fields({"model": sizes.model, **fields}, prompt=prompt)


@worst
def a_long_echo_that_is_streamed(sizes: ServerSizes) -> Body:
    fields = {"model": sizes.model, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    return COMPLETIONS, with_fields(fields, prompt=array(b"1", 2 * (sizes.context - 2)))


@worst
def a_text_of_spaces_to_tokenize(sizes: ServerSizes) -> Body:
    return TOKENIZE, with_fields({"return_token_strs": True}, prompt=b'"' + b" " * (1 << 20) + b'"')


@worst
def a_text_of_as_many_spaces_as_become_tokens(sizes: ServerSizes) -> Body:
    return TOKENIZE, with_fields({"return_token_strs": True}, prompt=b'"' + b" " * (1 << 18) + b'"')


@worst
def as_many_token_ids_as_become_text(sizes: ServerSizes) -> Body:
    return DETOKENIZE, with_fields({}, tokens=array(b"150", 4 << 18))
