"""Bodies that are decoded in pieces: the same as when they are decoded at once, but for what is refused."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.api.asks_nothing import FIELDS
from segue.api.guided import FIELD_NAMES
from segue.api.native import NativeGenerate, parse_call
from segue.api.openai.chat_fields import MAX_TOOLS
from segue.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from segue.api.openai.responses.call import parse_responses
from segue.api.token_generate import TokenGenerate, parse_token_call
from segue.api.tokenization import MAX_IDS
from segue.api.validation import Decoded, parse
from segue.api.vllm import AbortRequests, UpdateWeights
from segue.errors import ContextLengthError, InvalidRequestError, SegueError, UnsupportedFieldError
from segue.frontend.sampling_options import MAX_ENTRIES, RequestLimits
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from segue.messages.weight_operations import MAX_TENSORS, OPERATIONS
from segue.server import json_pieces, large_body
from segue.server.large_body import Shape, decode
from segue.server.large_control import MAX_BUCKETS, control
from segue.server.large_generation import (
    MAX_STRINGS,
    MAX_TOOL_BYTES,
    chat,
    chat_tokens,
    completion,
    detokenize,
    generate,
    responses,
    token_generate,
    tokenize,
)

MAX_PROMPTS = 6
LIMITS = RequestLimits(max_seq_len=40, vocab_size=1000, eos_ids=())
MODEL = ServedModel(
    names=["m"], max_prompts=MAX_PROMPTS, encoder=cast(PromptEncoder, SimpleNamespace(limits=LIMITS))
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 2000)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(['"', "\\", '\\"', "],[", '","', "{}", ",", ":", "\n", "é🙂", "a" * 40])
)
VALUES = st.sampled_from([[1 << 31], [[-1 << 40]]]) | st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "2"]) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
IDS = st.lists(st.integers(0, 999), max_size=30)
TEXTS = st.text(max_size=30)
STRINGS = st.lists(TEXTS, max_size=MAX_PROMPTS)
BIAS = st.dictionaries(
    st.integers(0, 999).map(str), st.integers(-100, 100) | st.floats(-100, 100), max_size=9
)
PART = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "developer"]), "content": TEXTS | st.lists(PART, max_size=4)},
    optional={"name": TEXTS, "tool_calls": st.just([]) | st.none(), "refusal": st.none()},
)
OPTIONS = {
    "logit_bias": BIAS,
    "stop_token_ids": IDS,
    "allowed_token_ids": IDS,
    "stop": TEXTS | st.lists(TEXTS, max_size=5),
    "temperature": st.floats(0, 2),
}
PARAMS = st.fixed_dictionaries({}, optional=OPTIONS | {"max_new_tokens": st.integers(1, 9)})
NAMES = st.lists(st.text(max_size=12).filter(lambda name: "," not in name), max_size=5)
BUCKET = st.fixed_dictionaries(
    {
        "names": NAMES,
        "dtypes": NAMES,
        "shapes": st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=6),
    }
)


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Right bodies, and bodies of which one field is anything, in JSON with and without spaces."""
    right = st.fixed_dictionaries(required, optional=optional)
    names = st.sampled_from([*required, *optional])
    return right | st.builds(lambda body, name, value: {**body, name: value}, right, names, VALUES)


CHAT = fields(
    {"model": st.just("m"), "messages": st.lists(MESSAGE, min_size=1, max_size=5)},
    OPTIONS | {"user": VALUES, "tools": VALUES, "n": st.just(1), "other": VALUES},
)
COMPLETION = fields(
    {"model": st.just("m"), "prompt": TEXTS | STRINGS | IDS | st.lists(IDS, max_size=MAX_PROMPTS)},
    OPTIONS | {"metadata": VALUES, "suffix": VALUES, "stream": st.booleans()},
)
INPUT_PART = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": TEXTS})
ITEM = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": TEXTS | st.lists(INPUT_PART, max_size=4)},
    optional={"type": st.just("message"), "id": TEXTS, "phase": st.none(), "summary": st.just([])},
)
RESPONSE = fields(
    {"model": st.just("m"), "input": TEXTS | st.lists(ITEM, max_size=5)},
    {
        "instructions": TEXTS,
        "metadata": st.dictionaries(TEXTS, TEXTS, max_size=3),
        "tools": st.lists(st.fixed_dictionaries({"type": TEXTS}, optional={"name": TEXTS}), max_size=3),
        "text": st.just({"format": {"type": "json_schema", "name": "n", "schema": {"a": [1]}}}),
        "user": VALUES,
        "background": VALUES,
        "other": VALUES,
    },
)
GENERATE = fields(
    {"sampling_params": PARAMS | st.lists(PARAMS, max_size=MAX_PROMPTS)},
    {
        "text": TEXTS | STRINGS,
        "input_ids": IDS | st.lists(IDS, max_size=MAX_PROMPTS),
        "rid": TEXTS | STRINGS,
        "extra": VALUES,
        "image_data": VALUES,
    },
)
TOKENS = fields(
    {"token_ids": IDS.filter(bool), "sampling_params": PARAMS},
    {"extra": VALUES, "features": VALUES, "request_id": TEXTS, "priority": st.integers(-2, 2)},
)
PREPARE = fields(
    {"num_buckets": st.integers(0, 3), "buckets": st.lists(BUCKET, max_size=4), "group_name": TEXTS},
    {
        "checksums": st.dictionaries(st.sampled_from(["a", "b.c", "d"]), st.integers(0, 2**64 - 1)),
        "extra": VALUES,
    },
)
DISTRIBUTED = BUCKET.flatmap(lambda bucket: fields({n: st.just(v) for n, v in bucket.items()}, {}))
UPDATE = BUCKET.flatmap(
    lambda bucket: fields(
        {
            "update_info": st.just(
                {"names": bucket["names"], "dtype_names": bucket["dtypes"], "shapes": bucket["shapes"]}
            )
        },
        {"weight_version": TEXTS, "extra": VALUES},
    )
)
ABORTED = fields({"request_ids": STRINGS}, {"extra": VALUES})
TENSOR = fields({"serialized_named_tensors": STRINGS}, {"load_format": TEXTS})


def native(body: Any) -> Any:
    call = parse_call(body, MAX_PROMPTS)
    for request in call.requests:
        check_ids(request.prompt, request.options.stop_token_ids, request.options.allowed_token_ids)
    return [(request.prompt, request.options) for request in call.requests]


def tokens(body: Any) -> Any:
    (request,) = parse_token_call(body, MODEL).requests
    check_ids(request.prompt, request.options.stop_token_ids, request.options.allowed_token_ids)
    return request.prompt, request.options, request.priority


def completions(body: Any) -> Any:
    request = parse_completion(body)
    check_ids(request.prompt, request.stop_token_ids, request.allowed_token_ids)
    return request


def chats(body: Any) -> Any:
    request = parse_chat(body)
    check_ids(request.stop_token_ids, request.allowed_token_ids)
    return request


def check_ids(*found: Any) -> None:
    """Refuse token ids of more than 32 bits, as the encoder does with a body that was decoded at once."""
    for value in found:
        if isinstance(value, int) and not -(1 << 31) <= value < 1 << 31:
            raise InvalidRequestError("an id of more than 32 bits")
        if isinstance(value, (list, tuple)):
            check_ids(*value)


def weights(name: str) -> tuple[Callable[[Any], Any], Callable[[ServedModel], Shape]]:
    kind = OPERATIONS[name]
    return partial(parse, kind), partial(control, kind)


def updates(body: Any) -> Any:
    return parse(UpdateWeights, body).operation()


FAMILIES: list[tuple[Any, Callable[[Any], Any], Callable[[ServedModel], Shape]]] = [
    (CHAT, chats, chat),
    (COMPLETION, completions, completion),
    (RESPONSE, parse_responses, responses),
    (GENERATE, native, generate),
    (TOKENS, tokens, token_generate),
    (PREPARE, *weights("prepare_weights_update")),
    (DISTRIBUTED, *weights("update_weights_from_distributed")),
    (TENSOR, *weights("update_weights_from_tensor")),
    (UPDATE, updates, partial(control, UpdateWeights)),
    (ABORTED, partial(parse, AbortRequests), partial(control, AbortRequests)),
]
NAMES_OF_FAMILIES = [
    *("chat", "completion", "response", "generate", "tokens", "prepare", "distributed", "tensor"),
    *("update", "aborted"),
]


@pytest.fixture(params=[(5, 1 << 20), (20, 1 << 20), (5, 0), (20, 60)], ids=str)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small, at_once = request.param
    monkeypatch.setattr(large_body, "SMALL", small)
    monkeypatch.setattr(json_pieces, "AT_ONCE", at_once)
    monkeypatch.setattr(json_pieces, "PIECE", 100)
    monkeypatch.setattr(json_pieces, "SLICE", 50)
    monkeypatch.setattr(json_pieces, "GROUP", 40)


REFUSED = "refused"


def outcome(check: Callable[[], Any]) -> Any:
    try:
        return plain(check())
    except SegueError:
        return REFUSED


def plain(value: Any) -> Any:
    """Comparable: the same numbers are the same in a list and in an array."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("bodies", "check", "shape"), FAMILIES, ids=NAMES_OF_FAMILIES)
@pytest.mark.parametrize("examples", [25, pytest.param(250, marks=pytest.mark.slow)])
def test_pieces_and_the_whole_are_the_same(bodies: Any, check: Any, shape: Any, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies, indent=st.sampled_from([None, 1]), escape=st.booleans())
    def compare(body: dict[str, Any], indent: int | None, escape: bool) -> None:
        data = json.dumps(body, indent=indent, ensure_ascii=escape).encode("utf-8", "replace")
        whole = outcome(lambda: check(msgspec.json.decode(data)))
        in_pieces = outcome(lambda: check(decode(data, shape(MODEL))))
        assert in_pieces == whole

    compare()


def right(shape: Callable[[ServedModel], Shape], body: bytes) -> dict[str, Any]:
    return decode(body, shape(MODEL))


def many(item: str, count: int) -> bytes:
    return ("[" + ",".join([item] * count) + "]").encode()


TOOL = '{"type":"function","function":{"name":"f"}}'
TOOL_OF_SIZE = b'[{"type":"function","function":{"name":"f","description":"%b"}}]'
LARGE = 20_000  # items, more than one piece of each kind


@pytest.mark.parametrize(
    ("shape", "field", "value", "words"),
    [
        (completion, "prompt", many("[1]", LARGE), f"{LARGE} prompts; at most 6"),
        (completion, "prompt", many('"a"', LARGE), f"{LARGE} prompts; at most 6"),
        (completion, "prompt", many("1", LARGE), f"{LARGE} tokens"),
        (completion, "prompt", b"[" + many("1", LARGE) + b"]", f"{LARGE} tokens"),
        (completion, "prompt", many("9e307", LARGE), "tokens"),
        (completion, "prompt", many("{}", LARGE), "expected a string, a list of strings"),
        (completion, "prompt", b'{"a":' + many("1", LARGE) + b"}", "expected a string, a list of strings"),
        (completion, "prompt", b'["a",' + many("1", LARGE) + b"]", "expected a string, a list of strings"),
        (completion, "prompt", b"[[1]," + many('"a"', LARGE)[1:], "expected a string"),
        (completion, "stop", many('"a"', LARGE), "at most 64"),
        (completion, "stop", many("1", LARGE), "stop: expected a string or a list of strings"),
        (completion, "stop_token_ids", many("1", MAX_ENTRIES + 1), f"at most {MAX_ENTRIES}"),
        (completion, "stop_token_ids", many("[]", LARGE), "stop_token_ids: expected a list of token ids"),
        (completion, "allowed_token_ids", many("1", MAX_ENTRIES + 1), f"at most {MAX_ENTRIES}"),
        (completion, "logit_bias", b'{"a":' + many("{}", LARGE) + b"}", "logit_bias: expected an object"),
        (completion, "temperature", many("1", LARGE), "temperature has 40001 bytes of JSON"),
        (chat, "messages", many('{"role":"user","content":""}', LARGE * 8), "640000 strings"),
        (chat, "messages", many("{}", LARGE), r"messages\[0\].role: this field is required"),
        (chat, "messages", many("1", LARGE), r"messages\[0\]: must be an object"),
        (
            chat,
            "messages",
            b'[{"role":"user","content":' + many("{}", LARGE) + b"}]",
            r"messages\[0\].content",
        ),
        (chat, "tools", many('{"a":"%s"}' % ("a" * 900), 40), r"tools\[0\].type: this field is required"),
        (chat, "tools", many(TOOL, MAX_TOOLS + 1), f"at most {MAX_TOOLS}"),
        (chat, "tools", TOOL_OF_SIZE % (b"a" * MAX_TOOL_BYTES), f"at most {MAX_TOOL_BYTES} are allowed"),
        (chat, "tools", b'{"a":%b}' % many("1", LARGE), "tools: expected a list of functions"),
        (generate, "text", many("1", LARGE), "text: expected a string or a list of strings"),
        (generate, "input_ids", many('"a"', LARGE), "input_ids: expected a list of token ids"),
        (generate, "rid", many('"a"', LARGE), "at most 6"),
        (generate, "sampling_params", many("{}", LARGE), "at most 6"),
        (generate, "sampling_params", many("1", LARGE), "sampling_params: expected an object"),
        (generate, "priority", b"1" * LARGE, "priority has 20000 bytes"),
        (token_generate, "token_ids", many("1", LARGE), f"{LARGE} tokens"),
        (token_generate, "token_ids", many('"a"', LARGE), "token_ids: expected a list of token ids"),
        (token_generate, "sampling_params", many("{}", LARGE), "sampling_params: expected an object"),
        (chat_tokens, "tokens", many("1", LARGE), f"{LARGE} tokens"),
        (tokenize, "prompt", many('"a"', LARGE), "prompt: expected a string"),
        (tokenize, "messages", many("{}", LARGE), r"messages\[0\].role: this field is required"),
        (detokenize, "tokens", many("1", MAX_IDS + 1), f"{MAX_IDS + 1} token ids; at most {MAX_IDS}"),
    ],
)
def test_too_many_items_and_wrong_ones_are_refused_by_name(
    shape: Callable[[ServedModel], Shape], field: str, value: bytes, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        right(shape, b'{"%b": %b}' % (field.encode(), value))
    assert (refused.value.param or "").startswith((field, "logit_bias"))
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("buckets", many('{"names":[],"dtypes":[],"shapes":[]}', 200_000), "at most"),
        (
            "buckets",
            many('{"names":[],"dtypes":[],"shapes":[]}', MAX_BUCKETS + 1),
            "32769 buckets",
        ),
        ("buckets", many("{}", LARGE), r"buckets\[0\].names: this field is required"),
        ("buckets", b'[{"names":' + many("1", LARGE) + b',"dtypes":[],"shapes":[]}]', "a list of buckets"),
        ("checksums", b'{"a":' + many("1", LARGE) + b"}", "checksums: expected an object of names"),
        (
            "checksums",
            b'{"a":%d,%b}' % (1 << 64, b",".join(b'"%d":1' % each for each in range(LARGE))),
            "checksums: expected an object of names",
        ),
    ],
)
def test_too_many_tensors_and_wrong_ones_are_refused_by_name(field: str, value: bytes, words: str) -> None:
    _, shape = weights("prepare_weights_update")
    with pytest.raises(InvalidRequestError, match=words):
        right(shape, b'{"%b": %b}' % (field.encode(), value))


def test_what_vllms_calls_may_have_is_bounded_too() -> None:
    with pytest.raises(InvalidRequestError, match="request_ids has 20000 items or more; at most 16384"):
        right(partial(control, AbortRequests), b'{"request_ids": %b}' % many('"a"', LARGE))
    for value, words in (
        (b'{"names": %b}' % many("1", LARGE), "names: expected a list of strings"),
        (b'{"dtype_names": %b}' % many('"a"', MAX_TENSORS + 1), f"at most {MAX_TENSORS}"),
        (many("1", LARGE), "update_info: expected an object"),
        (b'{"extra": %b}' % many("1", LARGE), None),
    ):
        if words is None:
            right(partial(control, UpdateWeights), b'{"update_info": %b}' % value)
            continue
        with pytest.raises(InvalidRequestError, match=words):
            right(partial(control, UpdateWeights), b'{"update_info": %b}' % value)


def test_shapes_by_the_million_are_refused_by_their_number() -> None:
    _, shape = weights("update_weights_from_distributed")
    with pytest.raises(InvalidRequestError, match="1000000 items"):
        right(shape, b'{"shapes": %b}' % many("[]", 1_000_000))
    with pytest.raises(InvalidRequestError, match="expected a list of lists of sizes"):
        right(shape, b'{"shapes": [%b]}' % many("1", LARGE))


def test_a_number_of_more_than_32_bits_is_no_token_id() -> None:
    with pytest.raises(InvalidRequestError, match="32 bits"):
        right(
            generate,
            b'{"input_ids": [%b]}' % (b"[1,2]," * 5 + b"[" + b"0," * 10 + b"5000000000]" + b" " * LARGE),
        )


def test_a_comma_behind_the_last_item_is_refused_wherever_the_pieces_end() -> None:
    decoder = msgspec.json.Decoder(dict[str, int])
    for items in range(json_pieces.PIECE // 2 - 3, json_pieces.PIECE // 2 + 3):
        with pytest.raises((json_pieces.MisfitError, msgspec.DecodeError)):
            json_pieces.token_ids(b"[%b]" % (b"1," * items), lambda count: None)
        with pytest.raises((json_pieces.MisfitError, msgspec.DecodeError)):
            json_pieces.members(b'{"a":%b1,}' % (b" " * 2 * items), decoder, lambda count: None)


def test_what_is_dropped_or_ignored_is_not_decoded() -> None:
    numbers = many("9e307", 1_000_000)  # ten seconds, if they were
    assert right(chat, b'{"user": %b, "model": "m"}' % numbers) == {"model": "m"}
    assert right(generate, b'{"extra": %b, "text": "a"}' % numbers) == {"text": "a"}


def test_a_large_value_of_a_field_that_is_not_supported_is_refused_as_a_small_one() -> None:
    tools = many('{"type":"function"}', LARGE)
    with pytest.raises(UnsupportedFieldError, match="functions is not supported"):
        parse_chat(right(chat, b'{"model": "m", "messages": [], "functions": %b}' % tools))
    with pytest.raises(UnsupportedFieldError, match="image_data is not supported"):
        native(right(generate, b'{"text": "a", "image_data": %b}' % tools))


def test_a_large_input_is_decoded_item_by_item_and_errors_name_its_item() -> None:
    item = '{"role":"user","content":[{"type":"input_text","text":"a"}]}'
    text, count = b"a" * LARGE, 2000

    def parsed(fields: bytes) -> Any:
        return parse_responses(right(responses, b"{%b}" % fields))

    found = parsed(b'"instructions": "%b", "input": %b' % (text, many(item, count)))
    assert len(found.input) == count and found.input[-1] == found.input[0]
    assert len(parsed(b'"input": "%b"' % text).input) == len(found.instructions) == LARGE
    wrong = many(item, count)[:-1] + b',{"role":"user","content":[{"type":5}]}]'
    for value, words in (
        (wrong, rf"input\[{count}\]\.content\[0\]"),
        (many('""', MAX_STRINGS + 1), "input has .* at most"),
        (b'{"a":"%b"}' % text, "input: expected a string or a list of items"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            parsed(b'"input": %b' % value)
    tools = many('{"type":"function","name":"f","description":"%s"}' % ("a" * 90), MAX_TOOLS)
    assert len(parsed(b'"input": "a", "tools": %b' % tools).tools) == MAX_TOOLS
    schema = b'{"format": {"type": "json_schema", "schema": {"description": "%b"}}}' % text
    assert len(parsed(b'"input": "a", "text": %b' % schema).text.format.schema["description"]) == LARGE
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parsed(b'"input": "a", "text": {"%b}' % text)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"text": "\xff' + b"a" * LARGE + b'"}', b'{"text": 01}', b"[" * LARGE]
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    for shape in (chat, completion, generate):
        with pytest.raises(InvalidRequestError):
            right(shape, body)


def test_fields_by_the_million_are_refused_by_their_number() -> None:
    same = b"{" + b'"seed":0,' * 500_000 + b'"model":"m"}'
    for shape, body in (
        (completion, same),
        (generate, b'{"text":"a","sampling_params":%b}' % same),
        (generate, b'{"text":"a","sampling_params":[%b]}' % same),
    ):
        with pytest.raises(InvalidRequestError, match="fields or more; at most 4096"):
            right(shape, body)


LONG = 2 << 20  # bytes, more than are scanned at once


@pytest.mark.parametrize("name", [b"x", b"x" * LONG, rb"\"" * LONG])
def test_a_field_that_a_long_body_should_not_have_is_named_in_short(name: bytes) -> None:
    body = b'{"%b": 1, "user": "%b", "text": "a"}' % (name, b"a" * LONG)
    with pytest.raises(UnsupportedFieldError) as refused:
        right(completion, body)
    assert len(refused.value.message) < 200
    assert right(generate, body) == {"text": "a"}


@pytest.mark.parametrize(
    "begin", [b"[", b'{"text" "a", ', b"{5: 1, ", b'{"text": "a"}, ', b'{"text": [, ', b"{,", b"{{", b'"']
)
@pytest.mark.parametrize("end", [b"", b"]", b"}"])
def test_what_is_long_and_no_object_is_refused(begin: bytes, end: bytes) -> None:
    for shape in (completion, generate):
        with pytest.raises(InvalidRequestError):
            right(shape, begin + b'"user": "%b"' % (b"a" * LONG) + end)


def test_a_wrong_message_far_behind_is_named() -> None:
    messages = many('{"role":"user","content":"%s"}' % ("a" * 100), 20_000)[:-1] + b',{"role":"bob"}]'
    with pytest.raises(InvalidRequestError, match=r"messages\[20000\].role"):
        right(chat, b'{"model":"m","messages":%b}' % messages)


def test_many_colons_that_are_not_of_fields_are_fine() -> None:
    assert len(right(generate, b'{"text":"%b"}' % (rb"\":{,\\" * 300_000))["text"]) == 5 * 300_000


@settings(max_examples=500, deadline=None)
@given(value=VALUES, size=st.integers(1, 30), indent=st.sampled_from([None, 1]))
def test_items_are_found_in_slices_of_any_size(value: Any, size: int, indent: int | None) -> None:
    items = value if isinstance(value, list) else [value, value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "SLICE", size)
        patch.setattr(json_pieces, "GROUP", 2 * size)
        patch.setattr(json_pieces, "AT_ONCE", 0)
        data = json.dumps(items, indent=indent).encode()
        ranges = json_pieces.cut(data, 100)
        assert [json.loads(data[start:end]) for start, end in ranges] == items
        together = list(json_pieces.groups(data, 100))
        assert [item for _, group in together for item in json.loads(group)] == items
        assert all(json.loads(group)[0] == items[first] for first, group in together)
        if len(items) > 1:
            with pytest.raises(json_pieces.TooManyItemsError):
                json_pieces.cut(data, len(items) - 1)


@pytest.mark.parametrize("data", [b"", b"[", b'["]', b"[1]]", b"[1],", b"[[1]", rb'["\\', b"]"])
def test_brackets_and_quotes_that_do_not_match_are_refused(data: bytes) -> None:
    with pytest.raises(json_pieces.MisfitError):
        json_pieces.cut(data, 100)


@pytest.mark.parametrize(
    "data",
    [b"[1,[2]]", b"[[1],]", b"[[1][2]]", b"[[1] 2]", b"[,[1]]", b"[[1],,[2]]", b"[[1]", b"[[1,2]", b"{[1]}]"],
)
def test_what_is_no_array_of_arrays_is_refused(data: bytes) -> None:
    for right in (b"[]", b"[ ]", b"[[]]", b"[ [ 1 ] ,\n[2,3] ]"):
        assert json_pieces.arrays(right, json.loads, lambda count: None) == json.loads(right)
    with pytest.raises((json_pieces.MisfitError, json.JSONDecodeError)):
        json_pieces.arrays(data, json.loads, lambda count: None)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from('a\\"'), max_size=6), max_size=30))
def test_strings_are_counted_to_within_one_half(texts: list[str]) -> None:
    count = json_pieces.count_strings(json.dumps(texts).encode())
    assert count <= len(texts) <= 2 * count + 1


@pytest.mark.parametrize("name", ["update_weights_from_distributed", "prepare_weights_update"])
def test_names_that_the_count_before_decoding_misses_are_counted(name: str) -> None:
    hidden = b"[" + b",".join([rb'"\\"'] * (MAX_TENSORS + 1)) + b"]"
    bucket = b'{"names":%b,"dtypes":[],"shapes":[]}' % hidden
    body = bucket if name.startswith("update") else b'{"group_name":"g","buckets":[%b]}' % bucket
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_TENSORS}"):
        decode(body, control(OPERATIONS[name], MODEL))


def test_every_field_of_a_model_is_known_to_its_shape() -> None:
    for shape, model, others in (
        (chat, ChatCompletionRequest, FIELDS["chat"]),
        (completion, CompletionRequest, FIELDS["completions"]),
        (generate, NativeGenerate, FIELDS["native"]),
        (token_generate, TokenGenerate, FIELDS["tokens"]),
    ):
        known = large_body._undecoded(shape(MODEL).model, shape(MODEL).skipped | shape(MODEL).refused)
        assert {*model.__struct_fields__, *others} <= {*known.__struct_fields__}


def test_prompts_become_compact_arrays() -> None:
    body = right(generate, b'{"input_ids": [[1, 2], [3]%b]}' % (b" " * LARGE))
    assert body == {"input_ids": Decoded([array("i", [1, 2]), array("i", [3])])}
    with pytest.raises(ContextLengthError):
        right(generate, b'{"input_ids": [[1, 2], %b]}' % many("1", LARGE))


def test_schemas_and_grammars_may_be_large_and_have_a_bound() -> None:
    schema = {"type": "object", "properties": {f"key{index}": {"type": "string"} for index in range(1500)}}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": wanted}
    assert parse_chat(decode(json.dumps(body).encode(), chat(MODEL))).response_format is not None
    for shape, params in (
        (generate(MODEL), {"json_schema": json.dumps(schema)}),
        (token_generate(MODEL), {"structured_outputs": {"json": schema}}),
    ):
        assert decode(json.dumps({"sampling_params": params}).encode(), shape)["sampling_params"] == params
    with pytest.raises(InvalidRequestError, match="regex has 131075 bytes of JSON; at most 131072"):
        decode(json.dumps({"regex": "a" * 131073}).encode(), chat(MODEL))
    messages = b'"messages": [{"role": "user", "content": "%b"}]' % (b"a" * json_pieces.AT_ONCE)
    for name in FIELD_NAMES:  # every one has a rule in words
        broken = b'{%b, "%b": "\\q%b"}' % (messages, name.encode(), b"a" * LARGE)
        with pytest.raises(InvalidRequestError, match=f"{name}: expected an? "):
            decode(broken, chat(MODEL))
