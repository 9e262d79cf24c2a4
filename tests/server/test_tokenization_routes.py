"""Text to token ids and back, and bodies rendered to what is generated from."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from segue.api import tokenization
from tests.server.conftest import MODEL, Api
from tests.server.live import LiveServer

TEXT = "Köln, 東京 and 🙂"
CHAT: Any = [{"role": "user", "content": "Hi"}]


def post(server: LiveServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response: httpx.Response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_text_becomes_token_ids_and_text_again(server: LiveServer) -> None:
    reply = post(server, "/tokenize", {"model": MODEL, "prompt": TEXT, "return_token_strs": True})
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 512)
    assert len(reply["token_strs"]) == reply["count"] and "K" in reply["token_strs"][0]
    assert post(server, "/detokenize", {"tokens": reply["tokens"]}) == {"prompt": TEXT}
    assert post(server, "/tokenize", {"prompt": ""})["tokens"] == []
    assert post(server, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_messages_are_rendered_first(server: LiveServer) -> None:
    def text_of(**fields: Any) -> str:
        tokens = post(server, "/tokenize", {"messages": CHAT, **fields})["tokens"]
        return str(post(server, "/detokenize", {"tokens": tokens})["prompt"])

    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert text_of() == f"{turn}<|im_start|>assistant\n"
    assert text_of(add_generation_prompt=False, tools=None) == turn
    assert text_of(continue_final_message=True) == "<|im_start|>user\nHi"


def test_long_texts_are_tokenized_in_a_thread_up_to_a_limit(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * 20_000  # far more than the context has
    reply = post(server, "/tokenize", {"prompt": text})
    assert reply["count"] > reply["max_model_len"]
    assert post(server, "/detokenize", {"tokens": reply["tokens"]})["prompt"] == text
    monkeypatch.setattr(tokenization, "MAX_CHARS", 99_999)
    error = post(server, "/tokenize", {"prompt": text}, status=400)["error"]
    assert "100000 characters; at most 99999" in error["message"] and error["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (
            "/tokenize",
            {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    error = post(server, path, body, status=400)["error"]
    assert error["param"].startswith(param)


def test_another_model_is_unknown(server: LiveServer) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert post(server, path, body | {"model": "other"}, status=404)["error"]["param"] == "model"


def test_what_a_conversation_is_rendered_to_can_be_generated_from(server: LiveServer) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 9, "temperature": 0, "logprobs": True}
    rendered = post(server, "/v1/chat/completions/render", body)
    assert rendered["request_id"].startswith("chatcmpl-") and rendered["features"] is None
    assert rendered["sampling_params"] == {"max_tokens": 9, "temperature": 0, "logprobs": 0}
    assert rendered["token_ids"] == post(server, "/tokenize", {"messages": CHAT})["tokens"]
    assert rendered["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    generated = post(server, "/inference/v1/generate", rendered)
    answered = post(server, "/v1/chat/completions", body | {"return_token_ids": True})
    assert generated["choices"][0]["token_ids"] == answered["choices"][0]["token_ids"]
    assert generated["request_id"] == rendered["request_id"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json": '{"type":"object"}'}),
        ({"guided_json": {"type": "null"}}, {"json": '{"type":"null"}'}),
        ({"guided_choice": ["a", "é"]}, {"choice": ["a", "é"]}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_what_guides_the_output_is_rendered_too(
    server: LiveServer, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    rendered = post(server, "/v1/chat/completions/render", {"messages": CHAT, "max_tokens": 3, **fields})
    assert rendered["sampling_params"] == {"max_tokens": 3, "structured_outputs": expected}
    assert post(server, "/inference/v1/generate", rendered)["choices"]


def test_each_text_is_rendered_alone(server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": ["ab", "c"], "max_tokens": 3, "stop": "x", "prompt_logprobs": 2}
    first, second = post(server, "/v1/completions/render", body)
    assert (first["prompt"], second["prompt"]) == ("ab", "c")
    assert first["sampling_params"] == {"max_tokens": 3, "stop": ["x"], "prompt_logprobs": 2}
    assert first["request_id"] != second["request_id"]
    one, other = post(server, "/v1/completions/render", body | {"n": 2, "rid": "r"})
    assert one == first | {"request_id": "r-0", "sampling_params": first["sampling_params"] | {"n": 2}}
    assert other["request_id"] == "r-1"
    (ids,) = post(server, "/v1/completions/render", body | {"prompt": [1, 2]})
    assert (ids["token_ids"], ids["prompt"]) == ([1, 2], None)
    too_long = post(server, "/v1/completions/render", body | {"prompt": [70] * 600}, status=400)
    assert too_long["error"]["code"] == "context_length_exceeded"


def test_an_echo_scores_a_prompt(api: Api) -> None:
    reply = api.complete("Hello", max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hello"
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == reply["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == 0


def test_tokens_go_in_and_out_beside_the_other_routes(server: LiveServer, api: Api) -> None:
    ids = post(server, "/tokenize", {"prompt": "abc"})["tokens"]
    params = {"max_tokens": 6, "logprobs": 0}
    tokens = post(server, "/inference/v1/generate", {"token_ids": ids, "sampling_params": params})
    reply = server.client.post(
        "/generate",
        json={"input_ids": ids, "sampling_params": {"max_new_tokens": 6}, "return_logprob": True},
    ).json()
    (choice,) = tokens["choices"]
    assert choice["token_ids"] == reply["output_ids"]
    found = [(entry["logprob"], entry["token_id"]) for entry in choice["logprobs"]["content"]]
    assert found == [(p, token) for p, token, _ in reply["meta_info"]["output_token_logprobs"]]
    error = post(server, "/inference/v1/generate", {"token_ids": []}, status=400)["error"]
    assert error["param"] == "token_ids"
    chat = {"model": MODEL, "messages": CHAT, "tokens": ids, "max_tokens": 6, "return_token_ids": True}
    chatted = post(server, "/v1/chat/completions/tokens", chat)
    assert chatted["prompt_token_ids"] == ids
    assert chatted["choices"][0]["token_ids"] == reply["output_ids"]
