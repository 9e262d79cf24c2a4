"""A request waits for the engine that takes the place of the one that was lost, and goes on there."""

from __future__ import annotations

import asyncio
import json
import os
import re
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from segue.discovery.base import OnRecords
from segue.discovery.file import FileDiscovery
from segue.router.discovery import DiscoveredWorkers
from tests.router.fake_servers import (
    REPLY,
    STREAM,
    Answer,
    Exchange,
    RunningRouter,
    native_error,
    overloaded,
    routed,
    run,
    say_hello,
    until,
)
from tests.router.successors import CohortEngine, discovering
from tests.router.test_relay_pairs import hand_over
from tests.router.test_relay_resume import (
    DONE,
    NUM_TOKENS,
    WHOLE_STREAM,
    dies_behind,
    fail_behind_three,
    finish,
    generate,
    token_event,
)
from tests.router.workers import report


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "failover"


async def lost(router: RunningRouter, engine: CohortEngine) -> None:
    """Kills an engine; returns once the router has forgotten it."""
    await engine.die()
    await until(lambda: router.registry.get(engine.id) is None, "the router has forgotten it")


async def waiting(router: RunningRouter, num: int = 1) -> None:
    await until(lambda: router.registry.counters.waits == num, f"{num} requests wait")


@pytest.mark.parametrize("answer", [dies_behind(3), fail_behind_three])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_stream_goes_on_at_the_successor(directory: Path, answer: Answer, path: str) -> None:
    async def test() -> None:
        first, second = CohortEngine(directory, 1, answer), CohortEngine(directory, 2, finish)
        async with discovering(directory, first) as router:
            request = asyncio.create_task(router.http.post(path, json=STREAM))
            await waiting(router)
            await first.die()
            await second.serve()
            assert (await request).content == WHOLE_STREAM
            assert second.exchanges[0].given == [1, 2, 3]
            assert (router.registry.counters.resumes, router.registry.counters.waits) == (1, 1)
        await second.die()

    run(test())


def test_a_reply_that_is_no_stream_goes_on_at_the_successor(directory: Path) -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for _ in range(2):
                exchange.send(b"")
            await exchange.hang_up()

        first, second = CohortEngine(directory, 1, answer), CohortEngine(directory, 2, finish)
        async with discovering(directory, first) as router:
            request = asyncio.create_task(router.generate())
            await waiting(router)
            await first.die()
            await second.serve()
            assert (await request).json() == {"tokens": NUM_TOKENS, "given": [1, 2]}
        await second.die()

    run(test())


async def begin_and_die(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.hang_up()


async def die_unanswered(exchange: Exchange) -> None:
    exchange.cut()


def refuse(code: str) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.whole(native_error(503, code), 503)

    return answer


@pytest.mark.parametrize(
    "answer",
    [begin_and_die, die_unanswered, refuse("engine_dead"), refuse("draining"), refuse("stale_epoch")],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_of_which_nothing_came_waits_for_the_successor(
    directory: Path, answer: Answer, is_stream: bool
) -> None:
    async def test() -> None:
        first, second = CohortEngine(directory, 1, answer), CohortEngine(directory, 2, finish)
        async with discovering(directory, first) as router:
            request = asyncio.create_task(router.generate(stream=is_stream))
            await waiting(router)  # although the router does not know yet that the engine has gone
            assert len(first.exchanges) == 1
            await second.serve()
            reply = await request
            assert reply.status_code == 200
            if is_stream:
                assert reply.content == WHOLE_STREAM
            assert [each.given for each in second.exchanges] == [[]]
        await second.die()

    run(test())


def test_a_router_that_has_just_started_waits_for_the_engine_that_a_record_names(directory: Path) -> None:
    async def answer(exchange: Exchange) -> None:
        await (exchange.whole(b"{}") if exchange.method == "GET" else finish(exchange))

    async def test() -> None:
        engine = CohortEngine(directory, 1, answer)
        engine.watch_status = 503  # the router cannot learn of it yet
        await engine.serve()
        async with discovering(directory) as router:
            await until(lambda: router.registry.get(engine.id) is not None, "the router knows of the record")
            request = asyncio.create_task(router.generate())
            models = asyncio.create_task(router.http.get("/v1/models"))
            await waiting(router)
            engine.watch_status = 200
            assert (await request).status_code == 200
            assert (await models).status_code == 200
            assert router.registry.counters.refused == 0
        await engine.die()

    run(test())


class LateDiscovery(FileDiscovery):
    """A place that answers late, as a server elsewhere does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.answers = asyncio.Event()

    async def watch(self, on_records: OnRecords) -> None:
        await self.answers.wait()
        await super().watch(on_records)


def test_a_router_that_has_just_started_waits_for_what_discovery_says(directory: Path) -> None:
    async def test() -> None:
        engine, late = CohortEngine(directory, 1, finish), LateDiscovery(directory)
        await engine.serve()
        async with routed(waits=False, resume_timeout_s=5) as router:
            router.router.discover(DiscoveredWorkers(late))
            request = asyncio.create_task(router.generate())
            await waiting(router)
            late.answers.set()
            assert (await request).status_code == 200
        await engine.die()

    run(test())


def test_discovery_that_says_nothing_is_not_waited_for_longer_than_the_limit(directory: Path) -> None:
    async def test() -> None:
        late = LateDiscovery(directory)
        async with routed(waits=False, resume_timeout_s=0.3) as router:
            router.router.discover(DiscoveredWorkers(late))
            reply = await router.generate()
            assert reply.status_code == 503 and "no engine has been active for 0.3 s" in reply.text
            late.answers.set()  # there is none
            await until(lambda: not router.registry.served, "it has answered")
            assert "has been active" not in (await router.generate()).text

    run(test())


def test_an_engine_that_a_record_names_is_not_waited_for_longer_than_the_limit(directory: Path) -> None:
    async def test() -> None:
        engine = CohortEngine(directory, 1, finish)
        engine.watch_status = 503
        await engine.serve()
        async with discovering(directory, resume_timeout_s=1.0) as router:
            await until(lambda: router.registry.get(engine.id) is not None, "the router knows of the record")
            for _ in range(2):  # the second one does not wait again
                reply = await router.generate()
                assert reply.status_code == 503
                assert "no engine of cohort c has been active for" in reply.text
            assert router.registry.counters.waits == 1
            await router.http.delete(f"/workers/{engine.id}")
            assert "cohort" not in (await router.generate()).text, "an operator has removed the last one"
        await engine.die()

    run(test())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_comes_while_no_engine_is_active_waits(directory: Path, is_stream: bool) -> None:
    async def test() -> None:
        first, second = CohortEngine(directory, 1, finish), CohortEngine(directory, 2, finish)
        async with discovering(directory, first) as router:
            await lost(router, first)
            requests = [asyncio.create_task(router.generate(stream=is_stream)) for _ in range(3)]
            await waiting(router, 3)
            await second.serve()
            assert [(await each).status_code for each in requests] == [200] * 3
        await second.die()

    run(test())


def test_a_request_is_refused_at_once_where_no_engine_was_ever_active(directory: Path) -> None:
    async def test() -> None:
        async with discovering(directory) as router:
            reply = await asyncio.wait_for(router.generate(), 30)  # a request that waits does so for a minute
            assert reply.status_code == 503 and reply.json()["error_code"] == "no_worker"
            assert router.registry.counters.waits == 0

    run(test())


def test_a_request_that_the_active_engine_refuses_does_not_wait(directory: Path) -> None:
    async def test() -> None:
        async def refuse(exchange: Exchange) -> None:
            await exchange.whole(overloaded(), 503)

        engine = CohortEngine(directory, 1, refuse)
        async with discovering(directory, engine) as router:
            reply = await asyncio.wait_for(router.generate(), 30)  # a request that waits does so for a minute
            assert reply.status_code == 503 and reply.json()["error_code"] == "overloaded"
            assert router.registry.counters.waits == 0

    run(test())


def test_nobody_waits_for_the_successor_of_an_engine_that_an_operator_removed(directory: Path) -> None:
    async def test() -> None:
        engine = CohortEngine(directory, 1, finish)
        async with discovering(directory, engine) as router:
            await router.http.delete(f"/workers/{engine.id}")
            assert (await asyncio.wait_for(router.generate(), 30)).status_code == 503
            assert router.registry.counters.waits == 0

    run(test())


def test_a_stopped_engine_is_replaced_and_what_it_sends_later_reaches_nobody(directory: Path) -> None:
    """As SIGSTOP and SIGCONT do it: its connections stay open, and it goes on where it was."""

    async def test() -> None:
        goes_on = asyncio.Event()

        async def stop(exchange: Exchange) -> None:
            await generate(exchange, 3)
            await goes_on.wait()
            exchange.send(token_event(777))
            await exchange.writer.drain()
            await exchange.gone.wait()

        old, new = CohortEngine(directory, 1, stop), CohortEngine(directory, 2, finish)
        async with discovering(directory, old) as router:
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts, received = reply.aiter_raw(), b""
                while not received.endswith(token_event(3)):
                    received += await anext(parts)
                await new.serve()  # the old one's record is still there
                await until(lambda: new.exchanges, "the successor has the request")
                goes_on.set()
                received += b"".join([part async for part in parts])
            assert received == WHOLE_STREAM
            assert new.exchanges[0].given == [1, 2, 3]
            await until(lambda: router.registry.get(old.id) is None or router.reason(old), "it is known")
            assert not router.serves(old)
            await old.put()  # it takes itself for active
            assert (await router.generate(stream=True)).content == WHOLE_STREAM
            assert len(old.exchanges) == 1
        await new.die()

    run(test())


def test_a_lower_epoch_that_comes_late_gets_nothing(directory: Path) -> None:
    async def test() -> None:
        new, old = CohortEngine(directory, 2, finish), CohortEngine(directory, 1, finish)
        async with discovering(directory, new, resume_timeout_s=0.3) as router:
            await lost(router, new)
            await old.serve()
            reply = await router.generate()
            assert reply.status_code == 503 and not old.exchanges
        await old.die()

    run(test())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_wait_in_vain_ends_with_an_error_that_names_the_cohort_and_the_option(
    directory: Path, is_stream: bool
) -> None:
    async def test() -> None:
        engine = CohortEngine(directory, 1, finish)
        async with discovering(directory, engine, resume_timeout_s=0.2) as router:
            await lost(router, engine)
            reply = await router.generate(stream=is_stream)
            assert reply.status_code == 503 and reply.json()["error_code"] == "no_worker"
            assert reply.headers["retry-after"]
            text = (
                r"no engine of cohort c has been active for \d+\.\d s, and requests wait for at most 0.2 s "
            )
            assert re.match(text + r"\(--resume-timeout-s\): no worker", reply.json()["message"])

    run(test())


def test_a_request_that_comes_long_after_the_last_engine_is_refused_at_once(directory: Path) -> None:
    async def test() -> None:
        engine, again = CohortEngine(directory, 1, finish), CohortEngine(directory, 2, finish)
        async with discovering(directory, engine) as router:
            await lost(router, engine)
            router.registry.served["c"] -= 61.0  # the router has been idle for a minute
            reply = await asyncio.wait_for(router.generate(), 30)  # a request that waits does so for a minute
            assert reply.status_code == 503 and reply.json()["error_code"] == "no_worker"
            assert re.match(r"no engine of cohort c has been active for 6\d", reply.json()["message"])
            assert router.registry.counters.waits == 0 and router.registry.counters.refused == 1
            await again.serve()
            await until(lambda: router.serves(again), "it serves")
            await lost(router, again)
            request = asyncio.create_task(router.generate())
            await waiting(router)  # its engine has been lost just now
            request.cancel()

    run(test())


def test_a_list_of_models_waits_for_the_successor_too(directory: Path) -> None:
    async def test() -> None:
        old, new = (CohortEngine(directory, epoch, say_hello) for epoch in (1, 2))
        async with discovering(directory, old) as router:
            await lost(router, old)
            asked = asyncio.create_task(router.http.get("/v1/models"))
            await new.serve()
            reply = await asked
            assert (reply.status_code, reply.content) == (200, REPLY)
        await new.die()

    run(test())


def test_a_list_of_models_does_not_wait_for_ever(directory: Path) -> None:
    async def test() -> None:
        engine = CohortEngine(directory, 1, say_hello)
        async with discovering(directory, engine, resume_timeout_s=0.2) as router:
            await lost(router, engine)
            assert (await router.http.get("/v1/models")).status_code == 503

    run(test())


def test_a_wait_in_vain_ends_a_stream_with_an_event(directory: Path) -> None:
    async def test() -> None:
        engine = CohortEngine(directory, 1, dies_behind(3))
        async with discovering(directory, engine, resume_timeout_s=0.2) as router:
            content = (await router.generate(stream=True)).content
            begin = b"".join(map(token_event, (1, 2, 3)))
            assert content.startswith(begin)
            event = json.loads(content.removeprefix(begin).split(b"\n\n")[0].removeprefix(b"data: "))
            assert "none took its place" in json.dumps(event) and "--resume-timeout-s" in json.dumps(event)

    run(test())


def test_a_client_of_a_waiting_stream_gets_comments(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.router.reply.KEEP_ALIVE_S", 0.0)

    async def test() -> None:
        first, second = CohortEngine(directory, 1, finish), CohortEngine(directory, 2, finish)
        async with discovering(directory, first) as router:
            await lost(router, first)
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                comment = b": keep-alive\n\n"
                assert (await anext(parts)).startswith(comment)
                await second.serve()
                rest = b"".join([part async for part in parts])
                assert rest.replace(comment, b"") == WHOLE_STREAM
        await second.die()

    run(test())


def test_a_client_that_leaves_while_its_request_waits_ends_the_wait(directory: Path) -> None:
    async def test() -> None:
        engine = CohortEngine(directory, 1, finish)
        async with discovering(directory, engine) as router:
            await lost(router, engine)
            with pytest.raises(httpx.ReadTimeout):
                await router.http.post("/generate", json=STREAM, timeout=0.2)
            await until(lambda: not router.server.server_state.tasks, "the request has ended")

    run(test())


def test_the_successor_of_a_decode_engine_goes_on_with_the_pair_s_output(directory: Path) -> None:
    async def test() -> None:
        first = CohortEngine(directory, 1, hand_over, "p", role="prefill")
        decoders = [
            CohortEngine(directory, 1, dies_behind(3), "d", role="decode"),
            CohortEngine(directory, 2, finish, "d", role="decode"),
        ]
        async with discovering(directory, first, decoders[0]) as router:
            request = asyncio.create_task(router.generate(stream=True))
            await waiting(router)
            await decoders[0].die()
            await decoders[1].serve()
            assert (await request).content == WHOLE_STREAM
            assert decoders[1].exchanges[0].given == [1, 2, 3]
        await decoders[1].die()

    run(test())


def test_a_takeover_that_takes_a_while_is_no_failure_of_the_request(directory: Path) -> None:
    """Several engines answer that they do not serve, before one does."""

    async def test() -> None:
        engines = [CohortEngine(directory, epoch, refuse("draining")) for epoch in range(1, 6)]
        async with discovering(directory, engines[0]) as router:
            request = asyncio.create_task(router.generate(stream=True))
            for before, engine in pairwise(engines):
                await until(lambda before=before: before.exchanges, "it has refused the request")
                await engine.serve()
            await until(lambda: engines[-1].exchanges, "the last one has refused the request")
            last = CohortEngine(directory, 6, finish)
            await last.serve()
            assert (await request).content == WHOLE_STREAM
            await last.die()
        for engine in engines:
            await engine.die()

    run(test())


@pytest.mark.parametrize("rounds", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_one_reply_survives_takeover_after_takeover_and_nothing_is_left_of_them(
    directory: Path, rounds: int
) -> None:
    """Each engine gives the next 40 tokens, and dies."""

    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            await generate(exchange, len(exchange.given) + 40)
            await exchange.hang_up()

        async def last(exchange: Exchange) -> None:
            await generate(exchange, 40 * rounds + 1)
            exchange.end(DONE)

        engine, num_open = CohortEngine(directory, 1, answer), 0
        async with discovering(directory, engine) as router:
            request = asyncio.create_task(router.http.post("/generate", json=STREAM, timeout=300.0))
            for epoch in range(2, rounds + 2):
                before, number = engine, epoch - 1
                await until(lambda number=number: router.registry.counters.waits == number, "it waits")
                await before.die()
                await until(lambda before=before: router.registry.get(before.id) is None, "it is forgotten")
                if epoch == 8:  # all that is made once has been made
                    num_open = len(os.listdir("/proc/self/fd"))
                engine = CohortEngine(directory, epoch, answer if epoch <= rounds else last)
                await engine.serve()
            whole = b"".join(map(token_event, range(1, 40 * rounds + 2))) + DONE
            assert (await request).content == whole
            await engine.die()
            await until(lambda: router.registry.get(engine.id) is None, "the last one is forgotten")
            assert len(os.listdir("/proc/self/fd")) <= num_open
            assert not list(router.registry) and not router.router.watching
            files = sorted(path.name for path in (directory / "discovery").iterdir())
            assert files == []

    asyncio.run(asyncio.wait_for(test(), 110))


def test_an_engine_that_reports_that_it_ends_is_one_whose_place_is_taken(directory: Path) -> None:
    async def test() -> None:
        first, second = CohortEngine(directory, 1, finish), CohortEngine(directory, 2, finish)
        async with discovering(directory, first) as router:
            first.report = report(epoch=1, state="draining")
            await until(lambda: not router.serves(first), "it drains")
            request = asyncio.create_task(router.generate())
            await waiting(router)
            await second.serve()
            assert (await request).status_code == 200
            assert not first.exchanges
        await second.die()

    run(test())
