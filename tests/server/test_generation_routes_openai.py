from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.server.conftest import MODEL, Api
from tests.server.events import read_stream
from tests.server.live import LiveServer

# What the template makes of the message "abc": the fake worker repeats it up to <|im_end|>.
ECHO = "user\nabc"


def chat_body(content: str = "abc", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]} | fields


def test_chat_answers_in_openais_shape(api: Api) -> None:
    reply = api.chat("abc").json()
    (choice,) = reply["choices"]
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == MODEL
    assert choice["message"] == {"role": "assistant", "content": ECHO}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_cached_prompt_tokens_are_counted(api: Api) -> None:
    prompt = list(range(100, 200))
    api.complete(prompt, max_tokens=1)
    usage = api.complete(prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96  # whole pages of 16


def test_chat_stream_has_role_then_text_then_reason_then_done(server: LiveServer) -> None:
    events = read_stream(server.client, "/v1/chat/completions", chat_body())
    *chunks, done = events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == ECHO
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_comes_in_a_chunk_of_its_own(server: LiveServer) -> None:
    body = chat_body(stream_options={"include_usage": True})
    *chunks, last, _ = read_stream(server.client, "/v1/chat/completions", body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks)


def test_stream_and_whole_reply_are_equal(api: Api, server: LiveServer) -> None:
    for text in ("Grüße 東京 🙂", "a<|im_end|>b", "plain"):
        body = chat_body(text, max_tokens=60, logprobs=True, top_logprobs=2)
        whole = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
        chunks = [e for e in read_stream(server.client, "/v1/chat/completions", body) if e != "[DONE]"]
        choices = [chunk["choices"][0] for chunk in chunks]
        streamed = [
            entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
        ]
        assert (
            "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
        )
        assert streamed == whole["logprobs"]["content"]


def test_chat_logprobs(api: Api) -> None:
    choice = api.chat("abc", logprobs=True, top_logprobs=2).json()["choices"][0]
    entry = choice["logprobs"]["content"][1]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("u", -0.5, [117])
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5]
    assert api.chat("abc", logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_logprobs_have_offsets_into_the_text(api: Api) -> None:
    choice = api.complete("aé東b", max_tokens=7, logprobs=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 7
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    assert logprobs["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["abc", "de"], ["abca", "dede"]),
        ([67, 68], ["abab"]),
        ([[67, 68], [69]], ["abab", "cccc"]),
    ],
)
def test_prompts_in_all_four_forms(api: Api, prompt: Any, texts: list[str]) -> None:
    reply = api.complete(prompt, max_tokens=4).json()
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))
    assert reply["usage"]["completion_tokens"] == 4 * len(texts)


def test_a_stream_of_several_prompts_is_told_apart_by_index(server: LiveServer) -> None:
    body = {
        "model": MODEL,
        "prompt": ["ab", "cd"],
        "max_tokens": 6,
        "stream_options": {"include_usage": True},
    }
    events = read_stream(server.client, "/v1/completions", body)
    texts = ["", ""]
    for event in events[:-2]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == ["ababab", "cdcdcd"]
    assert events[-2]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stop", ["c", ["x", "ca"]])
def test_stop_strings_end_the_text_before_them(api: Api, stop: Any) -> None:
    choice = api.complete("abc", stop=stop).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "stop"


def test_stop_strings_never_show_in_a_stream(server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "hello there ", "max_tokens": 100, "stop": "there hel"}
    chunks = [event for event in read_stream(server.client, "/v1/completions", body) if event != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello "


def test_stop_token_ids_and_ignore_eos(api: Api) -> None:
    reply = api.complete("ab<|im_end|>c", stop_token_ids=[69], ignore_eos=True, max_tokens=50).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["text"] == "ab"
    assert reply["usage"]["completion_tokens"] == 4


def test_max_completion_tokens_is_the_new_name(api: Api, server: LiveServer) -> None:
    reply = server.client.post("/v1/chat/completions", json=chat_body(max_completion_tokens=3)).json()
    assert reply["usage"]["completion_tokens"] == 3
    assert reply["choices"][0]["finish_reason"] == "length"


def test_every_sampling_field_is_accepted(api: Api) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"67": 5},
        "min_tokens": 2,
        "stop": None,
        "stop_token_ids": [70],
        "ignore_eos": False,
    }
    assert api.chat(**fields).status_code == 200
    assert api.complete(**fields).status_code == 200


def test_null_means_the_default(api: Api) -> None:
    names = (
        "temperature",
        "top_p",
        "seed",
        "stop",
        "max_tokens",
        "logprobs",
        "stream",
        "logit_bias",
        "n",
        "tools",
    )
    assert api.chat(**dict.fromkeys(names)).status_code == 200


def test_fields_that_ask_for_nothing_are_accepted(api: Api) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    nothing = {
        "n": 1,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "safety_identifier": "x",
    }
    assert api.chat(**harmless, **nothing).status_code == 200
    assert api.complete(n=1, best_of=1, echo=False, suffix=None, **harmless).status_code == 200


def test_a_prompt_without_output(api: Api) -> None:
    for reply in (api.complete("abc", max_tokens=0).json(), api.chat("abc", max_tokens=0).json()):
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 0
        assert (choice.get("text") or choice.get("message", {}).get("content")) in ("", None)


def test_ids_and_salts_of_clients(api: Api) -> None:
    cached = []
    for rid, salt in (("one", "a"), ("two", "b"), ("three", "a"), ("four", None)):
        reply = api.complete("a prompt that nobody else sends" * 4, rid=rid, cache_salt=salt).json()
        assert reply["id"] == rid
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[1] == cached[3] == 0 < cached[2]


def test_roles_and_parts(server: LiveServer) -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            "name": "n",
        },
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "t", "tool_call_id": "x"},
    ]
    body = chat_body() | {"messages": messages, "ignore_eos": True, "max_tokens": 60}
    text = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text.startswith("system\nd\nuser\none\ntwo\nassistant\na\ntool\nt\nassistant\n")


def test_models(server: LiveServer) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 512)
    assert server.client.get(f"/v1/models/{MODEL}").json() == card
    missing = server.client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_the_openai_client_streams(server: LiveServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "abc"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5},
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ECHO
    assert chunks[-1].usage is not None


def test_the_openai_client_raises_its_own_error(server: LiveServer) -> None:
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(BadRequestError) as e,
    ):
        client.completions.create(model=MODEL, prompt="x", max_tokens=10_000)
    assert e.value.code == "context_length_exceeded"
    assert e.value.param == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_an_engine_that_hands_no_kv_over_refuses_the_bootstrap_fields_by_name(
    api: Api, route: str, stream: bool
) -> None:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    response = getattr(api, route)("abc", stream=stream, **where)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "bootstrap_room")
    assert "bootstrap_room=7: this engine hands no KV over; start it with --role" in error["message"]


def test_a_prefill_engine_answers_with_the_first_token(tiny_model: Path) -> None:
    with LiveServer(tiny_model, disaggregation_mode="prefill") as server:
        api = Api(server.client)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
        whole = api.complete("abc", **where, bootstrap_room=1).json()
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 20, **where, "bootstrap_room": 2}
        *_, last, done = read_stream(server.client, "/v1/completions", body)
        generated = api.generate("abc", **where, bootstrap_room=3).json()
    assert whole["choices"][0]["finish_reason"] == last["choices"][0]["finish_reason"] == "length"
    assert (whole["usage"]["completion_tokens"], done) == (1, "[DONE]")
    assert generated["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
