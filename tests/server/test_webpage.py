"""The web page in a real browser, before real servers; and its files as they are sent."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.server.webpage import files
from tests.conftest import WaitUntil
from tests.server.live import LiveServer
from tests.support import chromium
from tests.support.certificates import make_certificate, tls_options

GOOD = "#state[data-tone=good]"
IN_TIME = 30_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.chromium() as found:
        yield found


class Visit:
    """A page in a browser's tab, and what its console says."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(IN_TIME)
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("requestfailed", lambda request: self.said.append(f"{request.url} {request.failure}"))
        self.page.goto(url)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: Any) -> None:
        self.context.close()


def until_text(page: Any, selector: str, text: str) -> None:
    """Waits until an element has this text somewhere."""
    page.locator(selector).filter(has_text=text).first.wait_for()


def test_the_chat_streams_by_keyboard_alone_and_the_charts_move(browser: Any, server: LiveServer) -> None:
    visit = Visit(browser, server.url)
    with visit as page:
        page.wait_for_selector(GOOD)
        page.wait_for_selector(".chart path.line", state="attached")  # two samples
        before = page.get_attribute(".chart path.line", "d")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the chat"
        page.keyboard.press("Enter")
        for _ in range(9):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "message":
                break
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        until_text(page, ".turn.model .note", "· first token")
        assert "Hello" in page.inner_text(".turn.model .text"), "the fake worker repeats the question"
        assert page.evaluate("document.activeElement.id") == "message", "the next question can be typed"
        page.keyboard.type("Again")
        page.keyboard.press("Enter")
        until_text(page, ".turn.model:last-child .note", "· first token")
        assert page.locator(".turn.model").count() == 2
        page.wait_for_function(
            "old => document.querySelector('.chart path.line').getAttribute('d') !== old", arg=before
        )
        page.wait_for_function(
            "[...document.querySelectorAll('.chart svg')].every(each => each.getAttribute('aria-label'))"
        )
        assert visit.said == []


def test_a_pause_is_shown_while_it_lasts_and_logged_and_the_server_s_errors_are_shown(
    browser: Any, server: LiveServer
) -> None:
    with Visit(browser, server.url) as page:
        page.wait_for_selector(GOOD)
        server.client.post("/pause_generation", json={"mode": "retract"})
        until_text(page, "#state", "paused (retract)")
        server.client.post("/continue_generation")
        server.client.post("/update_weight_version", json={"new_version": "step-7"})
        page.wait_for_selector(GOOD)
        until_text(page, "#log-entries", "generation continues")
        until_text(page, "#log-entries", "pause (retract): 0 running, 0 waiting")
        until_text(page, "#chips", "weights step-7")
        server.client.post("/update_weight_version", json={"new_version": "0"})  # as other tests expect it
        page.click(".options summary")
        page.fill("#tools", "[1,")
        page.fill("#message", "Hello")
        page.keyboard.press("Enter")
        until_text(page, ".error", "Tools must be JSON")
        page.fill("#tools", "")
        page.fill("[name=max_tokens]", "100000")
        page.press("#message", "Enter")
        until_text(page, ".error", "max_tokens")  # the server's words
        assert page.input_value("#message") == "Hello", "it can be sent again"


def test_an_answer_can_be_stopped(browser: Any, server: LiveServer, wait_until: WaitUntil) -> None:
    with Visit(browser, server.url) as page:
        page.wait_for_selector(GOOD)
        server.client.post("/pause_generation", json={"mode": "in_place"})  # so that it does not end before
        page.fill("#message", "Hello")
        page.press("#message", "Enter")
        wait_until(lambda: server.runtime.manager.num_requests == 1)
        page.click("#stop")
        page.wait_for_selector("#send:not([hidden])")
        wait_until(lambda: server.runtime.manager.num_requests == 0)
        server.client.post("/continue_generation")
        page.click("#clear")
        assert page.locator(".turn").count() == 0


def events_of(*deltas: dict[str, Any]) -> str:
    """A streamed reply of the chat with these deltas."""
    chunks = [json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])


def test_tools_and_a_schema_are_sent_if_filled_in_and_a_call_gets_its_result(
    browser: Any, server: LiveServer
) -> None:
    """With replies that the server does not give yet: thoughts, and a call of a tool."""
    tool, schema = {"type": "function", "function": {"name": "weather"}}, {"type": "object"}
    function = {"name": "weather", "arguments": '{"city":'}
    replies = [
        events_of(
            {"reasoning_content": "I must look. "},
            {"tool_calls": [{"index": 0, "id": "call-1", "function": function}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ' "<b>Rome</b>"}'}}]},
        ),
        events_of({"content": "It "}, {"content": "rains."}),
    ]
    asked: list[Any] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=replies[len(asked) - 1])

    with Visit(browser, server.url) as page:
        page.route("**/v1/chat/completions", answer)
        page.wait_for_selector(GOOD)
        page.click(".options summary")
        page.fill("#tools", json.dumps([tool]))
        page.fill("#schema", json.dumps(schema))
        page.fill("#system", "Be brief.")
        page.fill("#message", "How is Rome?")
        page.press("#message", "Enter")
        until_text(page, ".turn.model pre", 'weather({"city": "<b>Rome</b>"})')
        assert page.inner_text(".thoughts") == "I must look. "
        assert page.locator(".turn b").count() == 0, "text stays text"
        page.get_by_label("Result of weather").fill("rain")
        page.press("#message", "Enter")
        until_text(page, ".turn.model:last-child .text", "It rains.")
    first, second = asked
    assert (first["tools"], first["response_format"]["json_schema"]["schema"]) == ([tool], schema)
    assert "temperature" not in first and "stop" not in first
    assert [each["role"] for each in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call-1", "content": "rain"}
    assert second["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"city": "<b>Rome</b>"}'


def test_it_has_a_dark_form_and_fits_a_phone(browser: Any, server: LiveServer) -> None:
    options = {"viewport": {"width": 320, "height": 640}, "color_scheme": "dark", "reduced_motion": "reduce"}
    with Visit(browser, server.url, **options) as page:
        page.wait_for_selector(GOOD)
        page.wait_for_selector(".life [aria-current]")
        page.click(".options summary")
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        brightness = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0]"
        dark = page.evaluate(brightness)
        page.emulate_media(color_scheme="light")
        assert dark < 60 < 200 < page.evaluate(brightness)


def test_it_says_that_the_engine_is_dead_or_away_and_goes_on_with_the_next_one(
    browser: Any, tiny_model: Path
) -> None:
    with LiveServer(tiny_model) as server:
        port = httpx.URL(server.url).port
        visit = Visit(browser, server.url)
        visit.page.wait_for_selector(GOOD)
        os.kill(server.runtime.worker_pids[0], signal.SIGKILL)
        until_text(visit.page, "#banner", "The engine is dead: worker rank 0")
        until_text(visit.page, "#log-entries .failed", "active → dead")
        assert '"state":"dead"' in server.client.get("/page_events").text, "the stream of a dead engine ends"
    until_text(visit.page, "#log-entries", "the server does not answer")
    with LiveServer(tiny_model, port=port or 0), visit as page:
        page.wait_for_selector(GOOD)
        page.wait_for_selector("#banner", state="hidden")
        until_text(page, "#log-entries", "another process answers")


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Any, tiny_model: Path) -> None:
    server = LiveServer(tiny_model, started=False, api_key="right")
    with server, Visit(browser, server.url) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        until_text(page, "#key-reason", "This key does not open the charts")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        until_text(page, "#state", "starting")
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert page.context.cookies() == []


def test_it_works_below_a_path_and_with_tls(browser: Any, tiny_model: Path, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path / "server.pem")
    options = {"root_path": "/segue", **tls_options(certificate)}
    with LiveServer(tiny_model, started=False, certificate=certificate, **options) as server:
        visit = Visit(browser, f"{server.url}/segue/", ignore_https_errors=True)
        with visit as page:
            until_text(page, "#state", "starting")
            assert visit.said == []


# --- the files ---


@pytest.fixture(scope="module")
def starting(tiny_model: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, started=False, api_key="key") as server:
        yield server


def test_the_files_need_no_key_and_are_sent_once(starting: LiveServer) -> None:
    for name in files():
        path = "/" if name == "index.html" else f"/page/{name}"
        whole = starting.client.get(path)
        head = starting.client.head(path)
        assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        known = {"if-none-match": f'"other", W/{whole.headers["etag"]}'}
        again = starting.client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")
        policy = whole.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert b"http://" not in whole.content.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in whole.content, "nothing is loaded from elsewhere"
    assert starting.client.get("/page_events").status_code == 401


def test_it_can_be_switched_off(tiny_model: Path) -> None:
    with LiveServer(tiny_model, started=False, disable_webpage=True) as server:
        for path in ("/", "/page/main.js", "/page_events"):
            assert server.client.get(path).status_code == 404
