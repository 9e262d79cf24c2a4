"""A client in a thread, which notes what it gets of one reply, and when."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx


@dataclass(slots=True)
class ReplyRead:
    """What a client has of one reply. Times are monotonic, in seconds."""

    status: int = 0
    text: str = ""
    ids: list[int] = field(default_factory=list)  # only of /generate
    num_ends: int = 0  # finish reasons, or whole replies
    num_done: int = 0  # [DONE], last events of responses, or whole replies
    num_events: int = 0  # only of responses
    error: str = ""  # an error event, an error reply, or what broke the connection
    came_at: list[float] = field(default_factory=list)  # when something new of the text came
    ended_at: float = 0.0

    @property
    def content(self) -> tuple[str, list[int]]:
        return self.text, self.ids

    @property
    def has_ended_once(self) -> bool:
        """Whether the reply is complete, and nothing of it came twice."""
        return (self.error, self.num_ends, self.num_done) == ("", 1, 1)

    def longest_pause(self, since: float) -> float:
        """Returns how long nothing new came at most, from a moment to the end; 0: it had ended before."""
        moments = [since, *(at for at in self.came_at if at > since)]
        if self.num_ends == 0 and self.ended_at > since:  # it broke off
            moments.append(self.ended_at)
        return max((b - a for a, b in pairwise(moments)), default=0.0)


class ReadingClient:
    """One request, which a thread sends and whose reply it reads to the end."""

    def __init__(
        self, url: str, path: str, body: dict[str, Any], timeout: float, headers: dict[str, str] | None = None
    ) -> None:
        """Send the request; no part of the reply may take longer than ``timeout`` seconds."""
        self.body = body
        self.got = ReplyRead()
        self._changed = threading.Condition()
        http = httpx.Client(timeout=timeout, headers=headers)
        self._thread = threading.Thread(target=self._run, args=(http, url + path, body), daemon=True)
        self._thread.start()

    def wait(self, tokens: int, timeout: float = 60.0) -> None:
        """Wait until this many tokens of a streamed /generate are there."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.got.error or len(self.got.ids) >= tokens, timeout)
        assert came and not self.got.error, f"{len(self.got.ids)} of {tokens} tokens came: {self.got}"

    def result(self, timeout: float) -> ReplyRead:
        """Wait for the end of the reply."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the reply does not end: {self.got} to {self.body}"
        return self.got

    def _run(self, http: httpx.Client, url: str, body: dict[str, Any]) -> None:
        got = self.got
        try:
            with http, http.stream("POST", url, json=body) as response:
                got.status = response.status_code
                if got.status == 200 and body.get("stream"):
                    for line in response.iter_lines():
                        with self._changed:
                            self._take(line)
                            self._changed.notify_all()
                else:
                    self._take_whole(json.loads(response.read()))
        except (httpx.HTTPError, json.JSONDecodeError, AssertionError) as error:
            with self._changed:
                got.error = repr(error)
                self._changed.notify_all()
        finally:
            got.ended_at = time.monotonic()

    def _take_whole(self, reply: dict[str, Any]) -> None:
        if self.got.status != 200:
            self.got.error = str(reply)
            return
        self.got.num_ends, self.got.num_done = 1, 1
        self._extend(reply)

    def _take(self, line: str) -> None:
        if not line or line.startswith((":", "event: ")):
            return
        assert not self.got.num_done, f"behind the end came {line}"
        if line == "data: [DONE]":
            self.got.num_done += 1
            return
        event = json.loads(line.removeprefix("data: "))
        if "sequence_number" in event:
            self._take_numbered(event)
            return
        if event.get("object") == "error" or "error" in event:
            self.got.error = line
            return
        self._extend(event)

    def _take_numbered(self, event: dict[str, Any]) -> None:
        """Take an event of a response, none of which may be missing or come twice."""
        got = self.got
        assert event["sequence_number"] == got.num_events, f"{event} behind {got}"
        got.num_events += 1
        match event["type"]:
            case "response.output_text.delta":
                got.text += event["delta"]
                got.came_at.append(time.monotonic())
            case "response.completed" | "response.incomplete":
                got.num_ends, got.num_done = got.num_ends + 1, got.num_done + 1
                (item,) = event["response"]["output"]
                assert item["content"][0]["text"] == got.text
            case "response.failed":
                got.error = str(event)

    def _extend(self, event: dict[str, Any]) -> None:
        """Take an event of a stream, or a whole reply of /generate."""
        got = self.got
        if "choices" in event:
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                got.text += text
                got.came_at += [time.monotonic()] * bool(text)
                got.num_ends += choice["finish_reason"] is not None
            return
        text, ids = event["text"], event["output_ids"]
        assert text.startswith(got.text) and ids[: len(got.ids)] == got.ids, f"{event} behind {got}"
        if len(ids) > len(got.ids):
            got.came_at.append(time.monotonic())
        got.text, got.ids = text, ids
        if self.body.get("stream"):
            got.num_ends += event["meta_info"]["finish_reason"] is not None
