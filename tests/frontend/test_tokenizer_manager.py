"""Tests of the tokenizer manager without sockets: its messages, and the effect of answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from segue.api.native import NativeReplies, parse_call
from segue.bootstrap_hosts import BootstrapHosts
from segue.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OverloadedError,
    RoleChangedError,
    SegueError,
)
from segue.failover.life import Life, LifeState
from segue.frontend.choices import choice_seed
from segue.frontend.request import GenerateRequest, Generation
from segue.frontend.sampling_options import RequestLimits, SamplingOptions
from segue.frontend.tokenizer import Tokenizer
from segue.frontend.tokenizer_manager import TokenizerManager, error_of
from segue.guided import beginning
from segue.messages.control import (
    Continue,
    Continued,
    Counters,
    EngineLimits,
    Flush,
    Flushed,
    FrontendMessage,
    GetState,
    Pause,
    Paused,
    Ready,
    SchedulerOutput,
    State,
)
from segue.messages.guided import GrammarSpec
from segue.messages.requests import (
    Abort,
    AddRequest,
    Finish,
    Finished,
    Handoff,
    Rejected,
    TokenLogprob,
    unpack_ids,
)
from segue.messages.weight_operations import BeginUpdate
from segue.messages.weight_update import WeightCall, WithdrawCall


class Bench:
    """A manager, and the messages that it has sent."""

    def __init__(
        self, model: Path | None, max_seq_len: int = 512, *, max_queued_requests: int = 4096
    ) -> None:
        self.sent: list[FrontendMessage] = []
        ready = Ready(
            limits=EngineLimits(
                max_seq_len=max_seq_len,
                num_pages=10,
                page_size=16,
                max_running_requests=4,
                chunked_prefill_size=64,
            ),
            vocab_size=320,
            device="cpu",
            dtype="float32",
            attention_backend="fake",
            weight_bytes=0,
            kv_bytes=0,
            init_steps=[],
        )
        tokenizer = None if model is None else Tokenizer.load(model)
        self.life = Life()
        for state in (LifeState.STANDBY, LifeState.WAKING, LifeState.ACTIVE):
            self.life.advance(state)
        self.manager = TokenizerManager(
            tokenizer,
            ready,
            self.sent.append,
            life=self.life,
            max_queued_requests=max_queued_requests,
            bootstrap_hosts=BootstrapHosts("10.0.0.1,fd00::/8", "127.0.0.1"),
            bootstrap_port=8998,
        )

    async def submit(self, request: GenerateRequest) -> Generation:
        return await self.manager.submit([request])

    def die(self, error: SegueError) -> None:
        """End the engine, as the runtime does."""
        self.life.advance(LifeState.DEAD, error)
        self.manager.die(error)

    def step(self, *tokens: tuple[str, int], finished: tuple[Finished, ...] = ()) -> None:
        self.manager.receive(self.output(Counters(), *tokens, finished=finished))

    @staticmethod
    def output(
        counters: Counters, *tokens: tuple[str, int], finished: tuple[Finished, ...] = ()
    ) -> SchedulerOutput:
        return SchedulerOutput(
            rids=[rid for rid, _ in tokens],
            tokens=[token for _, token in tokens],
            finished=list(finished),
            counters=counters,
        )


@pytest.fixture
def bench(tiny_model: Path) -> Bench:
    return Bench(tiny_model)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def request(rid: str = "r", prompt: Any = (65, 66), **options: Any) -> GenerateRequest:
    return GenerateRequest(rid=rid, prompt=prompt, options=SamplingOptions(**options))


def ended(rid: str, count: int, reason: Any = "length") -> Finished:
    return Finished(rid=rid, reason=reason, num_tokens=count, prompt_tokens=2, cached_tokens=0)


def test_a_text_is_tokenized_and_sent(bench: Bench) -> None:
    async def work() -> None:
        await bench.submit(request(prompt="Hello"))
        (message,) = bench.sent
        assert isinstance(message, AddRequest)
        assert bench.manager.table.text(unpack_ids(message.prompt)[0]) == "He"

    run(work())


def test_a_rid_in_flight_is_refused_and_free_again_after_its_end(bench: Bench) -> None:
    async def work() -> None:
        await bench.submit(request("r"))
        with pytest.raises(InvalidRequestError, match="'r' is in flight"):
            await bench.submit(request("r"))
        bench.step(("r", 70), finished=(ended("r", 1),))
        await bench.submit(request("r"))

    run(work())


def test_one_of_two_concurrent_calls_with_one_rid_is_refused(bench: Bench) -> None:
    async def work() -> None:
        text = "Hello " * 1000  # long enough to be tokenized in a thread
        bench.manager.encoder.limits = RequestLimits(max_seq_len=10_000, vocab_size=320, eos_ids=())
        calls = [bench.submit(request("r", text)) for _ in range(2)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [
            "Generation",
            "InvalidRequestError",
        ]
        assert len(bench.sent) == 1

    run(work())


def test_an_aborted_rid_is_in_flight_until_the_scheduler_ends_it(bench: Bench) -> None:
    async def work() -> None:
        with await bench.submit(request("r")):
            pass
        assert bench.sent[-1] == Abort(rid="r")
        with pytest.raises(InvalidRequestError):
            await bench.submit(request("r"))

    run(work())


class HeldTokenizer:
    """Has one token per character. ``encode`` waits for ``go_on``."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self.go_on.wait(60)
        return [ord(char) for char in text]


@pytest.fixture
def held(bench: Bench) -> HeldTokenizer:
    tokenizer = HeldTokenizer()
    bench.manager.encoder.tokenizer = cast(Any, tokenizer)
    bench.manager.encoder.limits = RequestLimits(max_seq_len=10_000, vocab_size=320, eos_ids=())
    return tokenizer


TEXT = "a" * 5000  # long enough to be tokenized in a thread


async def arriving(
    bench: Bench, *requests: GenerateRequest, batch_id: str | None = None
) -> asyncio.Task[Generation]:
    """Start a call, and return while its prompts are being tokenized."""
    task = asyncio.create_task(bench.manager.submit(requests, batch_id))
    while bench.manager.num_requests < len(requests):
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    "abort", [{"rid": "a"}, {"rid": "batch"}, {"abort_all": True}, {"rid": "a", "message": "enough"}]
)
def test_a_request_that_is_aborted_during_tokenization_ends_at_once(
    bench: Bench, held: HeldTokenizer, abort: dict[str, Any]
) -> None:
    async def work() -> None:
        task = await arriving(bench, request("a", TEXT, logprobs=1), batch_id="batch")
        with pytest.raises(InvalidRequestError, match="in flight"):
            await bench.submit(request("a"))
        bench.manager.abort(**abort)
        with await task as call:
            (output,) = await call.outputs()
        assert output.end is not None
        assert (output.end.reason, output.end.message) == (
            "abort",
            abort.get("message", "Abort before prefill"),
        )
        assert output.token_ids == []
        await bench.manager.wait_idle()
        await bench.manager.submit([request("a")], "batch")  # both are free again
        held.go_on.set()
        assert [message.rid for message in bench.sent if isinstance(message, AddRequest)] == ["a"]

    run(work())


def test_one_request_of_a_batch_may_be_aborted_during_tokenization(bench: Bench, held: HeldTokenizer) -> None:
    async def work() -> None:
        task = await arriving(bench, request("a", TEXT), request("b", TEXT), batch_id="batch")
        bench.manager.abort("a")
        held.go_on.set()
        first, second = (await task).states
        assert first.end is not None and second.end is None
        assert [message.rid for message in bench.sent if isinstance(message, AddRequest)] == ["b"]
        bench.manager.abort("batch")
        assert bench.sent[-1] == Abort("b")

    run(work())


def test_a_call_whose_client_leaves_during_tokenization_is_dropped(bench: Bench, held: HeldTokenizer) -> None:
    async def work() -> None:
        task = await arriving(bench, request("a", TEXT), batch_id="batch")
        task.cancel()
        await asyncio.wait({task})
        await bench.manager.wait_idle()
        held.go_on.set()
        await bench.manager.submit([request("a")], "batch")
        assert len(bench.sent) == 1

    run(work())


def test_a_pause_with_mode_abort_ends_requests_in_tokenization(bench: Bench, held: HeldTokenizer) -> None:
    async def work() -> None:
        task = await arriving(bench, request("a", TEXT))
        pause = asyncio.create_task(bench.manager.pause_generation("abort"))
        call, _ = await asyncio.gather(task, answer(bench, PAUSED))
        (output,) = await call.outputs()
        assert output.end is not None and output.end.reason == "abort"
        assert (await pause).num_aborted == PAUSED.num_aborted + 1
        held.go_on.set()

    run(work())


def test_other_pauses_keep_requests_in_tokenization(bench: Bench, held: HeldTokenizer) -> None:
    async def work() -> None:
        task = await arriving(bench, request("a", TEXT))
        pause = asyncio.create_task(bench.manager.pause_generation("retract"))
        await answer(bench, PAUSED)
        held.go_on.set()
        await task
        assert (await pause).num_aborted == PAUSED.num_aborted
        assert isinstance(bench.sent[-1], AddRequest)

    run(work())


def test_a_batch_is_sent_whole_or_not_at_all(bench: Bench) -> None:
    async def work() -> None:
        with pytest.raises(InvalidRequestError, match="9999"):
            await bench.manager.submit([request("a"), request("b", prompt=[9999])], "batch")
        assert bench.sent == []
        assert bench.manager.num_requests == 0

    run(work())


def test_the_same_rid_twice_in_a_batch_is_refused(bench: Bench) -> None:
    async def work() -> None:
        with pytest.raises(InvalidRequestError, match="'a'"):
            await bench.manager.submit([request("a"), request("a")], "batch")

    run(work())


def test_a_batchs_id_aborts_its_children_that_still_run(bench: Bench) -> None:
    async def work() -> None:
        await bench.manager.submit([request("a"), request("b"), request("c")], "batch")
        bench.step(("b", 70), finished=(ended("b", 1),))
        del bench.sent[:]
        bench.manager.abort("batch", message="enough")
        assert sorted(bench.sent, key=str) == [Abort("a", message="enough"), Abort("c", message="enough")]

    run(work())


def test_a_prompts_id_aborts_its_choices_and_a_batchs_id_those_of_all_prompts(bench: Bench) -> None:
    def choice(prompt: str, number: int) -> GenerateRequest:
        each = request(f"{prompt}-{number}", seed=7)
        return replace(each, group=prompt, choice=number, prompt=[65] if prompt == "a" else [66])

    async def work() -> None:
        calls = [choice(prompt, number) for prompt in "ab" for number in range(3)]
        await bench.manager.submit(calls, "batch")
        sent = [message for message in bench.sent if isinstance(message, AddRequest)]
        assert [unpack_ids(message.prompt) for message in sent] == [[65]] * 3 + [[66]] * 3
        assert [message.params.seed for message in sent] == [
            choice_seed(7, number) for number in (0, 1, 2)
        ] * 2
        with pytest.raises(InvalidRequestError, match="rid='a' is in flight"):
            await bench.submit(request("a"))
        bench.step(("a-1", 70), finished=(ended("a-1", 1),))
        del bench.sent[:]
        bench.manager.abort("a")
        assert {message.rid for message in bench.sent if isinstance(message, Abort)} == {"a-0", "a-2"}
        bench.step(finished=(ended("a-0", 0), ended("a-2", 0)))
        await bench.submit(request("a"))
        del bench.sent[:]
        bench.manager.abort("batch")
        assert {message.rid for message in bench.sent if isinstance(message, Abort)} == {"b-0", "b-1", "b-2"}
        bench.step(finished=tuple(ended(f"b-{number}", 0) for number in range(3)))
        assert bench.manager._batches == {}

    run(work())


def test_choices_that_are_refused_leave_no_ids_behind(bench: Bench) -> None:
    async def work() -> None:
        calls = [replace(request(f"a-{i}", prompt=[9999]), group="a", choice=i) for i in range(2)]
        with pytest.raises(InvalidRequestError, match="9999"):
            await bench.manager.submit(calls, "a")
        assert bench.manager._batches == {} and bench.manager.num_requests == 0

    run(work())


def test_an_alias_aborts_the_requests_of_every_call_that_has_it(bench: Bench) -> None:
    async def work() -> None:
        calls = [[request("a")], [request("b0"), request("b1")], [request("c")], [request("same")]]
        made = [
            await bench.manager.submit(each, None if len(each) == 1 else "b", alias=alias)
            for each, alias in zip(calls, ("same", "same", "other", ""), strict=True)
        ]
        bench.step(("b1", 70), finished=(ended("b1", 1),))
        del bench.sent[:]
        assert bench.manager.num_of(["same", "a", "b", "x"]) == 3, "a, b0 and the one with that id, each once"
        made[3].close()  # a client that leaves aborts its own request alone, whatever others call theirs
        assert bench.sent == [Abort("same")]
        bench.manager.abort("same", message="enough")
        rids = {message.rid for message in bench.sent[1:] if isinstance(message, Abort)}
        assert rids == {"a", "b0", "same"}
        bench.step(finished=tuple(ended(rid, 0, "abort") for rid in ("a", "b0", "same")))
        assert list(bench.manager._aliases) == ["other"]

    run(work())


def test_a_call_that_is_refused_leaves_no_alias(bench: Bench) -> None:
    async def work() -> None:
        with pytest.raises(InvalidRequestError):
            await bench.manager.submit([request("a"), request("b", prompt=[9999])], "batch", alias="x")
        assert bench.manager._aliases == {}

    run(work())


def test_only_exact_rids_are_aborted(bench: Bench) -> None:
    async def work() -> None:
        await bench.submit(request("abc"))
        del bench.sent[:]
        for rid in ("", "ab", "abcd", "unknown"):
            bench.manager.abort(rid)
        assert bench.sent == []

    run(work())


def test_a_stop_string_is_reported_to_the_scheduler_once(bench: Bench) -> None:
    async def work() -> None:
        ids = bench.manager.encoder.tokenizer.encode("ab") if bench.manager.encoder.tokenizer else []
        await bench.submit(request("r", stop=("a",)))
        for token in (*ids, *ids):
            bench.step(("r", token))
        assert [message for message in bench.sent if isinstance(message, Finish)] == [Finish("r", 1)]

    run(work())


def test_tokens_that_arrive_before_a_read_are_one_output(bench: Bench) -> None:
    async def work() -> None:
        call = await bench.submit(request("r"))
        for token in (65, 66, 67):
            bench.step(("r", token))
        reader = asyncio.create_task(anext(call.updates()))
        bench.step(("r", 68), finished=(ended("r", 4),))
        assert (await reader)[1].token_ids == [65, 66, 67, 68]

    run(work())


def test_a_refused_request_gets_the_schedulers_error(bench: Bench) -> None:
    async def work() -> None:
        call = await bench.submit(request("r"))
        bench.manager.receive(Rejected("r", "OverloadedError", "4096 requests wait"))
        with pytest.raises(OverloadedError, match="4096"):
            await anext(call.updates())
        assert bench.manager.num_requests == 0

    run(work())


def test_a_request_that_ends_with_an_error_has_no_reply(bench: Bench) -> None:
    async def work() -> None:
        one, other = [await bench.submit(request(rid)) for rid in ("r", "other")]
        end = Finished(
            rid="r",
            reason="error",
            num_tokens=1,
            prompt_tokens=1,
            cached_tokens=0,
            message="the logits are not finite",
            error="NonFiniteLogitsError",
        )
        bench.step(("r", 70), ("other", 71))
        bench.step(("other", 72), finished=(end,))
        with pytest.raises(NonFiniteLogitsError, match="the logits are not finite") as raised:
            await one.outputs()
        assert (raised.value.status, raised.value.code) == (500, "non_finite_logits")
        assert bench.manager.num_requests == 1
        bench.step(("other", 73), finished=(ended("other", 3),))
        assert (await other.outputs())[0].token_ids == [71, 72, 73]
        assert bench.manager.stats.finished["error"] == 1

    run(work())


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_gives_the_tokens_that_came_before_an_error(bench: Bench, count: int) -> None:
    async def work() -> None:
        call = await bench.manager.submit([request(str(index)) for index in range(count)])
        for token in (65, 66):
            bench.step(*((str(index), token) for index in range(count)))
        bench.die(EngineDeadError("gone"))
        got: list[tuple[int, list[int]]] = []
        with pytest.raises(EngineDeadError, match="gone"):
            async for index, output in call.updates():
                got.append((index, output.token_ids))
        assert sorted(got) == [(index, [65, 66]) for index in range(count)]
        with pytest.raises(EngineDeadError, match="gone"):
            await call.outputs()

    run(work())


def test_the_engines_death_ends_everything_and_refuses_later_calls(bench: Bench) -> None:
    async def work() -> None:
        call = await bench.submit(request("r"))
        state = asyncio.create_task(bench.manager.calls.get_state())
        await asyncio.sleep(0)
        bench.die(EngineDeadError("gone"))
        for waiting in (
            call.outputs(),
            state,
            bench.submit(request("s")),
            bench.manager.calls.get_state(),
        ):
            with pytest.raises(EngineDeadError, match="gone"):
                await waiting

    run(work())


PAUSED = Paused(
    call=0, mode="retract", num_running=0, num_waiting=3, num_retracted=2, num_aborted=1, drained_ms=4.0
)


async def answer(bench: Bench, message: Paused | Continued | Flushed) -> None:
    """Answer the last call, once it is sent."""
    await asyncio.sleep(0)
    call = cast(Pause, bench.sent[-1]).call
    bench.manager.receive(structs.replace(message, call=call))


CALLS: list[tuple[Callable[[TokenizerManager], Coroutine[Any, Any, Any]], FrontendMessage, Any]] = [
    (lambda manager: manager.pause_generation("retract"), Pause(1, "retract"), PAUSED),
    (lambda manager: manager.pause_generation("wait", 2.5), Pause(1, "wait", 2.5), PAUSED),
    (lambda manager: manager.calls.continue_generation(), Continue(1), Continued(0)),
    (
        lambda manager: manager.calls.flush_cache(3.0),
        Flush(1, 3.0),
        Flushed(call=0, success=False, error_msg="not now"),
    ),
]


@pytest.mark.parametrize(("call", "sent", "reply"), CALLS)
def test_control_calls_wait_for_their_answers(bench: Bench, call: Any, sent: Any, reply: Any) -> None:
    async def work() -> None:
        begun = time.monotonic()
        task = asyncio.create_task(call(bench.manager))
        await answer(bench, reply)
        (message,) = bench.sent
        if isinstance(message, Pause):
            assert message.sent is not None and begun <= message.sent <= time.monotonic()
            message = structs.replace(message, sent=None)
        assert message == sent
        got = await task
        if isinstance(reply, Continued):
            assert got is None
        else:
            assert structs.asdict(got) | {"call": 0} == structs.asdict(reply)

    run(work())


@pytest.mark.parametrize(("call", "_", "__"), CALLS)
def test_control_calls_fail_with_the_engine(bench: Bench, call: Any, _: Any, __: Any) -> None:
    async def work() -> None:
        task = asyncio.create_task(call(bench.manager))
        await asyncio.sleep(0)
        bench.die(EngineDeadError("gone"))
        for waiting in (task, call(bench.manager)):
            with pytest.raises(EngineDeadError, match="gone"):
                await waiting

    run(work())


def test_the_engines_death_ends_requests_in_tokenization(bench: Bench, held: HeldTokenizer) -> None:
    async def work() -> None:
        task = await arriving(bench, request("a", TEXT))
        bench.die(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await task
        assert bench.manager.num_requests == 0
        held.go_on.set()

    run(work())


def test_state_answers_find_their_callers(bench: Bench) -> None:
    async def work() -> None:
        calls = [asyncio.create_task(bench.manager.calls.get_state()) for _ in range(2)]
        await asyncio.sleep(0)
        numbers = [message.call for message in bench.sent if isinstance(message, GetState)]
        for number in reversed(numbers):
            bench.manager.receive(State(number, {"n": number}, []))
        assert [(await call).state["n"] for call in calls] == numbers

    run(work())


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(bench: Bench) -> None:
    async def work() -> None:
        start = time.process_time()  # the encoder's threads count
        with pytest.raises(ContextLengthError, match="at least"):
            await bench.submit(request(prompt="Hello world, how are you? " * 500_000))
        assert time.process_time() - start < 1.0  # tokenizing all of it takes several seconds

    run(work())


def test_a_text_is_judged_by_its_tokens_and_not_by_its_length(tiny_model: Path) -> None:
    bench = Bench(tiny_model, max_seq_len=2000)

    async def work() -> None:
        text = "a" * 1999
        tokenizer = bench.manager.encoder.tokenizer
        assert tokenizer is not None and len(tokenizer.encode(text)) == 1999
        await bench.submit(request(prompt=text))
        with pytest.raises(ContextLengthError, match="has 2000 tokens"):
            await bench.submit(request("s", prompt=text + "a"))

    run(work())


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    bench = Bench(None)

    async def work() -> None:
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await bench.submit(request(prompt="Hello"))
        call = await bench.submit(request(prompt=[1, 2]))
        bench.step(("r", 5), finished=(ended("r", 1),))
        (output,) = await call.outputs()
        assert (output.text, output.token_ids) == ("", [5])

    run(work())


def test_errors_are_known_by_name() -> None:
    assert type(error_of("ContextLengthError", "x")) is ContextLengthError
    assert type(error_of("ZeroDivisionError", "x")) is EngineDeadError


def test_a_weight_call_that_is_cancelled_is_withdrawn(bench: Bench) -> None:
    async def work() -> None:
        asking = asyncio.create_task(bench.manager.calls.ask_weights(BeginUpdate()))
        await asyncio.sleep(0)
        (call,) = bench.sent
        assert isinstance(call, WeightCall)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert bench.sent[1:] == [WithdrawCall(call.call)]
        pausing = asyncio.create_task(bench.manager.calls.continue_generation())
        await asyncio.sleep(0)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        assert len(bench.sent) == 3, "no other kind of call is withdrawn"

    run(work())


# --- requests that begin with outputs ---


def resumed(*outputs: int, **options: Any) -> GenerateRequest:
    return replace(request("r", **options), outputs=outputs)


def test_outputs_travel_with_the_request_and_only_what_follows_is_read(bench: Bench) -> None:
    async def work() -> None:
        tokenizer = bench.manager.encoder.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode("aé東b")  # characters of two and three tokens
        assert len(ids) > 4
        for border in range(1, len(ids)):
            call = await bench.submit(resumed(*ids[:border]))
            (state,) = call.states
            message = bench.sent[-1]
            assert isinstance(message, AddRequest)
            assert (unpack_ids(message.prompt), unpack_ids(message.outputs)) == ([65, 66], ids[:border])
            assert not state.changed.is_set() and not state.has_unread
            text, updates = state.whole().text, call.updates()
            for token in ids[border:-1]:
                bench.step(("r", token))
                text += (await anext(updates))[1].text
            bench.step(("r", ids[-1]), finished=(ended("r", len(ids)),))
            _, output = await anext(updates)
            assert text + output.text == "aé東b"
            assert output.end is not None and output.end.num_tokens == len(ids)

    run(work())


def test_a_stop_string_across_the_border_ends_the_request(bench: Bench) -> None:
    async def work() -> None:
        a, b, c = (bench.manager.encoder.tokenizer.encode(x)[0] for x in "abc")  # type: ignore[union-attr]
        call = await bench.submit(resumed(a, b, stop=("bc",)))
        assert call.states[0].whole().text == "a"  # "b" may begin the stop string
        bench.step(("r", c))
        assert bench.sent[-1] == Finish("r", 3)
        bench.step(finished=(ended("r", 3),))
        (output,) = await call.outputs()
        assert (output.text, output.end and output.end.matched) == ("a", "bc")

    run(work())


def test_a_stop_string_in_the_outputs_ends_the_request_at_once(bench: Bench) -> None:
    async def work() -> None:
        a, b = (bench.manager.encoder.tokenizer.encode(x)[0] for x in "ab")  # type: ignore[union-attr]
        await bench.submit(resumed(a, b, stop=("b",)))
        assert isinstance(bench.sent[-2], AddRequest) and bench.sent[-1] == Finish("r", 2)

    run(work())


def test_outputs_are_the_models_tokens(bench: Bench) -> None:
    async def work() -> None:
        with pytest.raises(InvalidRequestError, match="outputs contains token id 320"):
            await bench.submit(resumed(70, 320))
        assert bench.manager.num_requests == 0

    run(work())


def test_a_grammar_that_the_engine_before_has_accepted_may_take_longer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "MAX_COMPILE_S", 1e-9)  # this machine is much slower
    monkeypatch.setattr(beginning, "ACCEPTED_PATIENCE", 1e12)
    grammar = GrammarSpec("regex", "a{3}b")

    async def work() -> None:
        for new in (request("new", grammar=grammar), resumed(97, grammar=grammar)):
            with pytest.raises(InvalidRequestError, match="to compile"):
                await bench.manager.submit([new])
        await bench.manager.submit([replace(resumed(97, grammar=grammar), is_accepted=True)])

    run(work())


def test_the_first_token_behind_outputs_is_not_a_requests_first(bench: Bench) -> None:
    async def work() -> None:
        await bench.submit(resumed(70))
        bench.step(("r", 71))
        stats = bench.manager.stats
        counted = (sum(stats.first_token.counts), sum(stats.between_tokens.counts), stats.prompt_tokens)
        assert counted == (0, 1, 0)

    run(work())


def test_the_native_reply_holds_the_outputs_that_the_client_has(bench: Bench) -> None:
    async def work() -> None:
        given = (TokenLogprob(70, -1.0),)
        call = parse_call({"input_ids": [65, 66], "rid": "r", "return_logprob": True}, 10)
        requests = [replace(call.requests[0], outputs=(70,), output_logprobs=given)]
        for read in ("updates", "result"):
            with await bench.manager.submit(requests) as generation:
                replies = NativeReplies(bench.manager, call, generation)
                last = bench.output(Counters(), ("r", 71), finished=(ended("r", 2),))
                bench.manager.receive(structs.replace(last, logprobs={"r": TokenLogprob(71, -2.0)}))
                if read == "updates":
                    (body,) = [update async for update in replies.updates()]
                else:
                    body, _ = await replies.result()
            table = bench.manager.table
            assert (body["text"], body["output_ids"]) == (table.text(70) + table.text(71), [70, 71])
            assert body["meta_info"]["output_token_logprobs"] == [[-1.0, 70, None], [-2.0, 71, None]]
            assert body["meta_info"]["completion_tokens"] == 2

    run(work())


def test_a_prompt_that_this_engine_cannot_hand_over_leaves_nothing_behind(bench: Bench) -> None:
    async def work() -> None:
        where = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": [7, 8]}
        requests = parse_call({"input_ids": [[65], [66]], "rid": ["a", "b"], **where}, 10).requests
        with pytest.raises(InvalidRequestError, match="bootstrap_room=7: this engine hands no KV over"):
            await bench.manager.submit(requests, "batch")
        assert bench.manager.num_requests == 0 and bench.sent == []

    run(work())


def test_an_engine_that_hands_no_kv_over_any_more_has_the_sender_try_another_one(bench: Bench) -> None:
    async def work() -> None:
        bench.manager.ready = structs.replace(bench.manager.ready, role="decode")
        where = {"bootstrap_host": "10.0.0.1", "bootstrap_room": 7}
        with pytest.raises(RoleChangedError, match="bootstrap_room=7: this engine's role has changed"):
            await bench.manager.submit(parse_call({"input_ids": [65], **where}, 10).requests)

    run(work())


@pytest.mark.parametrize(
    ("role", "host", "handoff"),
    [
        ("prefill", "10.0.0.1", Handoff(id=7, part="prefill")),
        ("decode", "10.0.0.1", Handoff(id=7, part="decode", peer="10.0.0.1:8998", whole=True)),
        ("decode", "fd00::1", Handoff(id=7, part="decode", peer="[fd00::1]:8998", whole=True)),
        ("decode", "[fd00::1]", Handoff(id=7, part="decode", peer="[fd00::1]:8998", whole=True)),
        ("decode", "2.2.2.2", None),
        ("prefill", "2.2.2.2", None),
        ("both", "2.2.2.2", None),
    ],
)
def test_an_engine_does_the_part_of_its_role(
    bench: Bench, role: Any, host: str, handoff: Handoff | None
) -> None:
    async def work() -> None:
        bench.manager.role = role
        where = {"bootstrap_host": host, "bootstrap_port": None, "bootstrap_room": 7}
        await bench.manager.submit(parse_call({"input_ids": [65], **where}, 10).requests)
        (message,) = bench.sent
        assert isinstance(message, AddRequest) and message.handoff == handoff
        is_warm_up = handoff is None and role == "prefill"
        assert (message.params.max_new_tokens == 1) is is_warm_up, "nobody would take the rest over"

    run(work())


def test_a_host_that_the_operator_has_not_allowed_is_refused(bench: Bench) -> None:
    async def work() -> None:
        bench.manager.role = "decode"
        where = {"bootstrap_host": ["10.0.0.1", "10.0.0.2"], "bootstrap_room": [7, 8]}
        with pytest.raises(InvalidRequestError, match=r"bootstrap_host='10\.0\.0\.2'"):
            await bench.manager.submit(parse_call({"input_ids": [[65], [66]], **where}, 10).requests)
        bench.manager.role = "prefill"  # it connects to nobody
        await bench.manager.submit(parse_call({"input_ids": [[65], [66]], **where}, 10).requests)

    run(work())
