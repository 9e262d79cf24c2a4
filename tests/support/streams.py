"""Requests of every kind, sent at the same time, and their replies in a form that can be compared."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

END_S = 60.0
WORDS = "the river ran past a small stone house and nobody came home before the evening"


def every_kind(model: str, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Ten requests: three dialects, streamed or not, batches, logprobs, stop strings, penalties, seeds.

    The last two are guided: one output is as long as the others, and one ends where its grammar is complete.
    """
    greedy = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    drawn = {"max_new_tokens": tokens, "temperature": 0.9, "ignore_eos": True, "frequency_penalty": 0.4}
    chat = {"model": model, "messages": [{"role": "user", "content": WORDS}]}
    openai = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    stops = {"stop": ["no reply has this text"], "temperature": 0.7, "seed": 5}
    answers = {
        **{"type": "array", "items": {"enum": ["yes", "no"]}, "x-guidance": {"whitespace_flexible": False}},
        **{"minItems": tokens // 10, "maxItems": tokens // 10},
    }
    schema = {"type": "json_schema", "json_schema": {"schema": answers}}
    guided = openai | {"temperature": 0.9, "seed": 4, "response_format": schema}
    regex = {"regex": f"([a-f]{{1,3}}-[0-9]{{1,3}};){{{tokens},}}", "sampling_seed": 7}
    return [
        ("/generate", {"text": WORDS, "stream": True, "sampling_params": greedy}),
        ("/generate", {"text": WORDS, "stream": True, "return_logprob": True, "sampling_params": greedy}),
        ("/generate", {"text": [WORDS, "x"], "stream": True, "sampling_params": greedy}),
        ("/generate", {"text": "a", "sampling_params": drawn | {"sampling_seed": 3}}),
        ("/v1/chat/completions", chat | openai | {"stream": True, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", chat | openai),
        ("/v1/completions", {"model": model, "prompt": WORDS, "stream": True} | openai | stops),
        ("/v1/completions", {"model": model, "prompt": "b"} | openai | {"logprobs": 1}),
        ("/generate", {"text": WORDS, "stream": True, "sampling_params": drawn | regex}),
        ("/v1/chat/completions", chat | guided | {"stream": True}),
    ]


@dataclass
class ReplyInParts:
    """One reply, read by a thread of its own."""

    path: str
    body: dict[str, Any]
    status: int = 0
    events: list[tuple[float, Any]] = field(default_factory=list)  # when each part came, and its content
    error: str | None = None

    def read(self, url: str) -> None:
        try:
            with httpx.stream("POST", url + self.path, json=self.body, timeout=END_S) as reply:
                self.status = reply.status_code
                if not self.body.get("stream"):
                    self.events.append((time.monotonic(), json.loads(reply.read())))
                    return
                ended = False
                for line in reply.iter_lines():
                    ended = ended or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        self.events.append((time.monotonic(), json.loads(line[6:])))
                if not ended:
                    self.error = "the stream has no end"
        except (httpx.HTTPError, ValueError) as error:
            self.error = repr(error)

    def first_after(self, moment: float) -> float | None:
        """When the first part behind a moment came; None: there is none."""
        return next((at for at, _ in self.events if at > moment), None)

    def content(self) -> Any:
        """All that the reply says, however it was cut into parts; what names one request is left out."""
        if self.error is not None or self.status != 200:
            return f"{self.status}: {self.error} {self.events[-1:]}"
        if self.path == "/generate":
            return self._native()
        return self._openai()

    def _native(self) -> Any:
        last: dict[int, Any] = {}
        for _, event in self.events:
            for each in event if isinstance(event, list) else [event]:
                if "error" in each:
                    return each
                last[each.get("index", 0)] = each
        found = []
        for each in (last[index] for index in sorted(last)):
            meta = {name: value for name, value in each.get("meta_info", {}).items() if name in _KEPT}
            found.append({"text": each["text"], "output_ids": each.get("output_ids"), "meta_info": meta})
        return found

    def _openai(self) -> Any:
        texts, ids, logprobs, finish, usage = [], [], [], None, None
        for _, event in self.events:
            if "error" in event:
                return event
            for choice in event["choices"]:
                message = choice.get("delta") or choice.get("message") or {}
                texts.append(message.get("content") or choice.get("text") or "")
                ids += choice.get("token_ids") or []
                logprobs += (choice.get("logprobs") or {}).get("content") or []
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
                finish = choice.get("finish_reason") or finish
            usage = event.get("usage") or usage
        if usage is not None:  # which tokens were in the prefix cache depends on who came first
            usage = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
        return {"text": "".join(texts), "ids": ids, "logprobs": logprobs, "finish": finish, "usage": usage}


_KEPT = {
    *("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs"),
    *("output_token_ids_logprobs", "weight_version"),
}


@dataclass
class ReplyGroup:
    """Requests that run at the same time."""

    replies: list[ReplyInParts]
    threads: list[threading.Thread]

    @classmethod
    def send(cls, url: str, requests: list[tuple[str, dict[str, Any]]]) -> ReplyGroup:
        replies = [ReplyInParts(path, body) for path, body in requests]
        threads = [threading.Thread(target=each.read, args=(url,), daemon=True) for each in replies]
        for thread in threads:
            thread.start()
        return cls(replies, threads)

    def have_begun(self, count: int) -> bool:
        """Whether every streamed reply has so many parts, or an end."""
        return all(
            len(reply.events) >= count or not thread.is_alive()
            for reply, thread in zip(self.replies, self.threads, strict=True)
            if reply.body.get("stream")
        )

    def end(self) -> list[Any]:
        """Wait for all of them; returns their contents."""
        for thread in self.threads:
            thread.join(END_S)
            assert not thread.is_alive(), "a reply does not end"
        return [reply.content() for reply in self.replies]
