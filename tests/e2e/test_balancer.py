"""A balancer like SGLang's drives a pair of servers; its replies are those of one server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import least_seconds
from tests.e2e.served import Served, greedy, serve
from tests.server.live import LiveServer
from tests.support.pd_balancer import PDBalancer

TEXT = "The capital of France is Paris. Hello world, how are you today? " * 3
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "page_size": 4,
    "num_kv_tokens": 2048,
    "chunked_prefill_size": 32,
    "disaggregation_bootstrap_port": 0,
}


class Servers:
    """One server that serves whole requests, and a pair of processes behind a balancer, with its options."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        options += [f"--model={model}", "--load-format=dummy", "--deterministic"]
        self.model = model.name
        self.whole = stack.enter_context(LiveServer(model, real=True, deterministic=True, **OPTIONS))
        self.prefill, self.decode = (
            stack.enter_context(serve("--role", role, *options)) for role in ("prefill", "decode")
        )
        address = self.prefill.get("/server_info").json()["decided"]["control_address"]
        self.http = stack.enter_context(httpx.Client(base_url=self.whole.url, timeout=60))
        host, port = address.rsplit(":", 1)
        urls = self.prefill.url, self.decode.url
        self.balancer = stack.enter_context(closing(PDBalancer(*urls, host, int(port))))

    def handover(self, served: Served) -> dict[str, Any]:
        found: dict[str, Any] = served.state()["handover"]
        return found

    def both(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the replies of one server and of the balancer."""
        replies = self.http.post(path, json=body), self.balancer.post(path, body)
        assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
        one, two = (reply.json() for reply in replies)
        return one, two


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tiny_model, stack)


def adopted(servers: Servers, since: int = 0) -> int:
    found: int = servers.handover(servers.decode)["num_adopted"]
    return found - since


def without_times(reply: Any) -> Any:
    """Returns a native reply without what differs between two runs of one engine."""
    if isinstance(reply, list):
        return [without_times(each) for each in reply]
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs")
    names += ("output_top_logprobs", "input_token_logprobs", "weight_version")
    meta = {name: reply["meta_info"].get(name) for name in names}
    return {"text": reply["text"], "output_ids": reply["output_ids"], **meta}


@pytest.mark.parametrize(
    "fields",
    [
        {"text": TEXT, "sampling_params": greedy(12)},
        {"input_ids": list(range(3, 60)), "sampling_params": greedy(12), **LOGPROBS},
        {"input_ids": [5], "sampling_params": {"temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 9}},
        {"text": [TEXT, TEXT[:20], "x"], "sampling_params": greedy(7)},
        {"input_ids": [[4, 5, 6], [7] * 40], "sampling_params": [greedy(5), greedy(9)], **LOGPROBS},
    ],
    ids=["text", "logprobs", "seed", "batch", "batch of ids"],
)
def test_a_native_request_is_answered_as_by_one_server(servers: Servers, fields: dict[str, Any]) -> None:
    before = adopted(servers)
    one, two = servers.both("/generate", fields)
    assert without_times(two) == without_times(one)
    assert adopted(servers, before) == (len(one) if isinstance(one, list) else 1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": TEXT, "logprobs": 2}),
        ("/v1/completions", {"prompt": [TEXT, "Hello"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ],
    ids=["completion", "batch", "chat"],
)
def test_an_openai_request_is_answered_as_by_one_server(
    servers: Servers, path: str, fields: dict[str, Any]
) -> None:
    before = adopted(servers)
    body = {"model": servers.model, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    one, two = servers.both(path, body | fields)
    assert (two["choices"], two["usage"]) == (one["choices"], one["usage"])
    assert adopted(servers, before) == len(one["choices"])


def test_a_stream_has_the_text_of_one_server(servers: Servers) -> None:
    body = {"model": servers.model, "prompt": TEXT, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    one = servers.http.post("/v1/completions", json=body).json()["choices"][0]
    lines = [line for line in servers.balancer.stream("/v1/completions", body) if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == one["text"]
    assert choices[-1]["finish_reason"] == one["finish_reason"]


def test_the_warm_up_moves_no_kv_and_waits_for_nobody(servers: Servers) -> None:
    before = servers.handover(servers.prefill), servers.handover(servers.decode)
    replies: list[Any] = []
    seconds = least_seconds(lambda: replies.append(servers.balancer.warm_up()), tries=2)
    assert seconds < 4.0, "a connection to 2.2.2.2 would be given up after 5 s"
    prefill, decode = replies[0]
    assert (prefill.status_code, decode.status_code) == (200, 200)
    assert len(prefill.json()["output_ids"]) == 1
    whole = {"input_ids": [10, 11, 12, 13], "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
    assert decode.json()["output_ids"] == servers.http.post("/generate", json=whole).json()["output_ids"]
    assert (servers.handover(servers.prefill), servers.handover(servers.decode)) == before


def test_a_host_that_is_not_allowed_is_refused_at_once(servers: Servers) -> None:
    body = {"input_ids": [5, 6], "bootstrap_host": "169.254.169.254", "bootstrap_port": 80}
    reply = httpx.post(servers.decode.url + "/generate", json=body | {"bootstrap_room": 1}, timeout=60)
    assert reply.status_code == 400
    assert "--disaggregation-bootstrap-hosts" in reply.json()["message"]


def test_every_half_on_the_prefill_server_was_answered(servers: Servers) -> None:
    replies = [each.result(60) for each in servers.balancer.prefills]
    assert {reply.status_code for reply in replies} == {200}
    assert servers.handover(servers.decode)["recomputed"] == {}
