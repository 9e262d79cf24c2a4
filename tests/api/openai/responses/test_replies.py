"""Events of a response that goes on elsewhere, and of one that fails."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from segue.api.openai.chat_fields import ReplyForm
from segue.api.openai.responses.call import WantedResponse
from segue.api.openai.responses.replies import ResponseReply
from segue.api.parsers.message import MessageFormat
from segue.errors import EngineStartError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, Output, RequestState
from segue.frontend.sampling_options import SamplingOptions
from segue.messages.requests import Finished

PIECES = ["<think>", "So", "", "</think>", "Yes", ", it", " is."]
TABLE = TokenTable([b"a", b"</think>"], special_ids=(1,))


def ended(reason: Any = "stop", **fields: Any) -> Finished:
    return Finished(rid="x", reason=reason, num_tokens=7, prompt_tokens=9, cached_tokens=4, **fields)


class Text:
    """The state of a request, as far as a reply looks at it."""

    def __init__(self, pieces: list[str], end: Finished | None = None) -> None:
        self.pieces, self.end = pieces, end
        self.ids = [0, 0, 1, 0, 0, 0, 0]

    def taken_pieces(self, first: int) -> list[str]:
        return self.pieces[first:]


def reply(text: Text, before: int = 0, end_before: Finished | None = None) -> ResponseReply:
    options = SamplingOptions()
    request = GenerateRequest(
        rid="resp_1", prompt="x", options=options, outputs=[0] * before, output_end=end_before
    )
    wanted = WantedResponse(
        id="resp_1",
        created=5,
        model="m",
        requests=[request],
        batch_id=None,
        stream=True,
        usage_in_stream=False,
        form=ReplyForm(text=MessageFormat(thinks=True)),
        echo=b'{"metadata":{}}',
    )
    return ResponseReply(wanted, cast(RequestState, text), TABLE)


def told(data: bytes) -> list[dict[str, Any]]:
    blocks = data.decode().removesuffix("\n\n").split("\n\n") if data else []
    return [json.loads(block.split("\ndata: ")[1]) for block in blocks]


def stream(end: Finished) -> list[bytes]:
    """Returns the bytes that each piece gives, and at last the end."""
    text = Text([])
    made, found = reply(text), []
    for piece in PIECES:
        text.pieces.append(piece)
        found.append(made.event(None))
    text.end = end
    return [*found, made.event(end), made.last_event()]


def test_a_stream_goes_on_behind_any_piece_to_the_byte() -> None:
    parts = stream(end := ended())
    events = told(b"".join(parts))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for count in range(1, len(PIECES) + 2):
        text = Text(PIECES[:count], end if count > len(PIECES) else None)
        made = reply(text, count, text.end)
        after = []
        for piece in PIECES[count:]:
            text.pieces.append(piece)
            after.append(made.event(None))
        if text.end is None:
            text.end = end
            after.append(made.event(end))
        assert b"".join([*parts[:count], *after, made.last_event()]) == b"".join(parts), count


def test_pieces_that_come_together_have_events_of_their_own() -> None:
    made = reply(Text(PIECES, ended()))
    assert made.event(ended()) + made.last_event() == b"".join(stream(ended()))


def test_many_pieces_are_counted_before_the_next_event() -> None:
    text = Text(PIECES[:6])
    made = reply(text, 6)
    assert made.num_before == 6
    made.catch_up()
    assert made.num_before == 0
    text.pieces.append(PIECES[6])
    assert made.event(None) == stream(ended())[6]


@pytest.mark.parametrize(
    ("end", "status", "details", "error"),
    [
        (ended(), "completed", None, None),
        (ended("length"), "incomplete", {"reason": "max_output_tokens"}, None),
        (ended("abort", message="By hand."), "failed", None, {"code": "server_error", "message": "By hand."}),
    ],
)
def test_the_end_says_what_has_become_of_it(end: Finished, status: str, details: Any, error: Any) -> None:
    *_, before, last = told(b"".join(stream(end)))
    response = last["response"]
    assert last["type"] == f"response.{status}" and response["status"] == status
    assert (response["incomplete_details"], response["error"]) == (details, error)
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 16,
    }
    item = before["item"]
    assert item["status"] == ("completed" if status == "completed" else "incomplete")
    assert item["content"][0]["text"] == "Yes, it is." and response["output"][1] == item
    output = Output("".join(PIECES), [], [], [], end)
    whole = json.loads(reply(Text(PIECES, end)).whole(output))
    assert whole == response and list(whole).index("usage") < list(whole).index("output")


def test_a_stream_that_an_error_breaks_off_ends_with_a_response_that_failed() -> None:
    for count in (0, 5):
        text = Text(PIECES[:count])
        made = reply(text)
        before = told(made.event(None)) if count else []
        events = [*before, *told(made.failure(EngineStartError("It died.")))]
        assert [event["type"] for event in events][:2] == ["response.created", "response.in_progress"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.failed" and response["status"] == "failed"
        assert response["error"] == {"code": "server_error", "message": "It died."}
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"][: count // 2]
