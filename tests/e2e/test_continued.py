"""A request that begins with output tokens gets the tokens that an uninterrupted one gets.

The test speaks to the scheduler of a real engine in its own messages, without a frontend.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from segue.config import EngineConfig
from segue.messages.control import (
    Flush,
    Flushed,
    FrontendMessage,
    Ready,
    SchedulerMessage,
    SchedulerOutput,
    Shutdown,
    StartStep,
)
from segue.messages.guided import GrammarSpec, GuidedVocabulary
from segue.messages.requests import AddRequest, Finished, SamplingParams, pack_ids
from segue.worker.main import run_scheduler
from tests.support.sensitive_model import write_sensitive_model

PROMPT = [504, 2232, 14270, 38567, 12110, 260, 5950, 971, 5256, 28, 284, 3487]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=11, top_p=0.95, frequency_penalty=0.5)


class Client:
    """The frontend's side of an engine that runs on a thread of this process."""

    def __init__(self, model: Path, run_dir: Path) -> None:
        context: zmq.Context[Any] = zmq.Context()
        addresses = ("inproc://to_scheduler", "inproc://to_frontend")
        self.sender, self.receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self.receiver.setsockopt(zmq.RCVTIMEO, 60_000)
        self.sender.connect(addresses[0])
        self.receiver.bind(addresses[1])
        config = EngineConfig(
            model=str(model), dtype="float32", page_size=16, num_kv_tokens=1024, max_running_requests=4
        )
        self.context = context
        self.thread = threading.Thread(
            target=run_scheduler, args=(config, run_dir, addresses, context), kwargs={"embedded": True}
        )
        self.thread.start()
        while not isinstance(message := self.receive(), Ready):
            assert isinstance(message, StartStep), message

    def send(self, message: FrontendMessage) -> None:
        self.sender.send(msgspec.msgpack.encode(message))

    def receive(self) -> SchedulerMessage:
        return msgspec.msgpack.decode(self.receiver.recv(), type=SchedulerMessage)

    def generate(self, params: SamplingParams, outputs: list[int]) -> tuple[list[int], Finished]:
        """Returns the new tokens of a request that begins with ``outputs``, and its end."""
        self.send(AddRequest(rid="r", prompt=pack_ids(PROMPT), params=params, outputs=pack_ids(outputs)))
        tokens: list[int] = []
        while True:
            output = self.receive()
            assert isinstance(output, SchedulerOutput)
            tokens += output.tokens
            if output.finished:
                return tokens, output.finished[0]

    def flush(self) -> None:
        self.send(Flush(1, timeout_s=10.0))
        while not isinstance(answer := self.receive(), Flushed):
            pass
        assert answer.success

    def close(self) -> None:
        self.send(Shutdown())
        self.thread.join(60)
        for socket in (self.sender, self.receiver):
            socket.close(linger=0)
        self.context.term()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = write_sensitive_model(tmp_path_factory.mktemp("model") / "sensitive-model")
    client = Client(model, tmp_path_factory.mktemp("run"))
    yield client
    client.close()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded, with a penalty"])
@pytest.mark.parametrize("cold", [False, True], ids=["KV in the prefix cache", "KV computed again"])
def test_a_request_goes_on_from_its_outputs_with_the_same_tokens(
    client: Client, params: SamplingParams, cold: bool
) -> None:
    whole, _ = client.generate(params, [])
    assert len(whole) == 24
    for count in (1, 8, 23):
        if cold:
            client.flush()
        tokens, finished = client.generate(params, whole[:count])
        assert tokens == whole[count:]
        assert (finished.reason, finished.num_tokens) == ("length", 24)
        assert (finished.cached_tokens > 0) is (not cold and count > 4), "a page has 16 tokens"


def test_a_request_whose_outputs_end_it_ends_at_once(client: Client) -> None:
    whole, _ = client.generate(GREEDY, [])
    tokens, finished = client.generate(GREEDY, whole)
    assert (tokens, finished.reason, finished.num_tokens) == ([], "length", 24)
    params = msgspec.structs.replace(GREEDY, stop_token_ids=(whole[4],))
    tokens, finished = client.generate(params, whole[:5])
    assert (tokens, finished.reason, finished.matched, finished.num_tokens) == ([], "stop", whole[4], 5)


def test_a_guided_request_goes_on_where_its_outputs_have_led_its_grammar(client: Client) -> None:
    tokens = [b"%d;" % token for token in range(49152)]  # each begins with its own number
    client.send(GuidedVocabulary(tokens=tokens, special_ids=[2], eos_ids=[2]))
    grammar = GrammarSpec("regex", "([0-9]*[02468];[0-9]*[13579];)*")  # an even token, then an odd one
    params = msgspec.structs.replace(SEEDED, grammar=grammar, stop_token_ids=(2,))
    whole, _ = client.generate(params, [])
    assert [token % 2 for token in whole] == [0, 1] * 12
    for count in (1, 8, 23):
        assert client.generate(params, whole[:count])[0] == whole[count:]
    tokens_after, finished = client.generate(params, [3])  # outputs that the grammar does not have
    assert (tokens_after, finished.reason, finished.error) == ([], "error", "GuidedOutputError")
