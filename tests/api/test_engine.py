"""``segue.Engine`` over the fake worker, which repeats the prompt."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import segue
from segue.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedFieldError,
)
from tests.conftest import least_measured
from tests.launch.test_processes import is_alive
from tests.support.child import start_child
from tests.support.fake_engine import FAKE_WORKER, FakeEngine, assert_nothing_left

ROOT = Path(__file__).resolve().parents[2]
LONG = {"max_new_tokens": 400, "ignore_eos": True}


def start(tiny_model: Path, **options: Any) -> FakeEngine:
    return FakeEngine(str(tiny_model), load_format="dummy", log_level="error", **options)


def test_a_prompt_gives_a_reply(engine: FakeEngine) -> None:
    reply = engine.generate("Hello world", {"max_new_tokens": 8})
    assert reply["text"] == "Hello worldHell"
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], len(reply["output_ids"])) == (6, 8, 8)
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]


def test_a_batch_gives_a_list_in_order(engine: FakeEngine) -> None:
    replies = engine.generate(["abc", "de"], [{"max_new_tokens": 3}, {"max_new_tokens": 4}])
    assert [reply["text"] for reply in replies] == ["abc", "dede"]


def test_several_choices_are_a_list(engine: FakeEngine) -> None:
    replies = engine.generate("abc", {"max_new_tokens": 3, "n": 2}, rid="mine")
    assert [reply["text"] for reply in replies] == ["abc", "abc"]
    assert [reply["meta_info"]["id"] for reply in replies] == ["mine_0", "mine_1"]
    updates = list(engine.generate("abc", {"max_new_tokens": 3, "n": 2}, stream=True))
    assert {update["index"] for update in updates} == {0, 1}


def test_prompt_logprobs_of_chunks_of_one_token(tiny_model: Path) -> None:
    with start(tiny_model, chunked_prefill_size=1, max_logprobs=100) as engine:
        scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 100}
        reply = engine.generate("abc", {"max_new_tokens": 2}, **scores)
        meta = reply["meta_info"]
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] > 1


def test_token_ids_are_taken_as_they_are(engine: FakeEngine) -> None:
    assert engine.generate(input_ids=[70, 71], sampling_params={"max_new_tokens": 3})["output_ids"] == [
        70,
        71,
        70,
    ]
    assert len(engine.generate(input_ids=([70], (71, 72)), sampling_params={"max_new_tokens": 1})) == 2


def test_an_eos_token_ends_and_is_counted(engine: FakeEngine) -> None:
    reply = engine.generate("Hi<|im_end|>", {"max_new_tokens": 50})
    assert reply["text"] == "Hi"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert reply["output_ids"][-1] == 2


def test_ignore_eos_goes_on(engine: FakeEngine) -> None:
    params = {"max_new_tokens": 9, "ignore_eos": True, "skip_special_tokens": False}
    reply = engine.generate("Hi<|im_end|>", params)
    assert reply["text"].startswith("Hi<|im_end|>Hi<|im_end|>")


def test_a_stop_string_cuts_everything(engine: FakeEngine) -> None:
    params = {"max_new_tokens": 100, "stop": ["o wor"]}
    reply = engine.generate("Hello world", params, return_logprob=True)
    meta = reply["meta_info"]
    assert reply["text"] == "Hell"
    assert meta["finish_reason"] == {"type": "stop", "matched": "o wor"}
    assert len(reply["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]


def test_logprobs_of_output_and_prompt(engine: FakeEngine) -> None:
    reply = engine.generate(
        input_ids=[70, 71, 72],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 70, "d"], [-0.5, 71, "e"]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 70, "d"], [-1.5, 71, "e"]]
    assert meta["input_token_logprobs"] == [[None, 70, "d"], [-0.5, 71, "e"], [-0.5, 72, "f"]]
    nothing, *top = meta["input_top_logprobs"]
    assert nothing is None and top == [
        [[-0.5, 71, "e"], [-1.5, 72, "f"]],
        [[-0.5, 72, "f"], [-1.5, 73, "g"]],
    ]


def test_a_prompt_is_scored_without_an_output_token(engine: FakeEngine) -> None:
    reply = engine.generate(
        input_ids=[70, 71, 72],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=1,
    )
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["input_token_logprobs"] == [[-0.5, 71, None], [-0.5, 72, None]]
    assert meta["input_top_logprobs"] == [[[-0.5, 71, None]], [[-0.5, 72, None]]]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    updates = list(engine.generate("abc", {"max_new_tokens": 0}, stream=True))
    assert [update["meta_info"]["finish_reason"]["type"] for update in updates] == ["length"]


def test_numbers_beyond_any_limit_do_no_harm(engine: FakeEngine) -> None:
    params = {"max_new_tokens": 10**400, "top_k": 10**400, "stop_token_ids": []}
    reply = engine.generate("abc", params, return_logprob=True, logprob_start_len=10**30)
    assert reply["meta_info"]["input_token_logprobs"] == []


def test_a_stream_grows_to_the_whole_reply(engine: FakeEngine) -> None:
    updates = list(engine.generate("Grüße aus 東京", {"max_new_tokens": 30}, stream=True))
    texts = [update["text"] for update in updates]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert not any("\ufffd" in text for text in texts[:-1])
    assert updates[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(update["meta_info"]["finish_reason"] is None for update in updates[:-1])
    for update in updates:
        assert len(update["output_ids"]) == update["meta_info"]["completion_tokens"]


def test_a_streamed_batch_tells_which_is_which(engine: FakeEngine) -> None:
    last = {u["index"]: u for u in engine.generate(["ab", "cd"], {"max_new_tokens": 4}, stream=True)}
    assert [last[index]["text"] for index in (0, 1)] == ["abab", "cdcd"]


def test_leaving_a_stream_early_aborts_it(engine: FakeEngine) -> None:
    stream = engine.generate("abc", LONG, stream=True)
    next(stream)
    stream.close()
    assert_nothing_left(engine)


def test_the_async_twins(engine: FakeEngine) -> None:
    async def work() -> None:
        reply = await engine.async_generate("abc", {"max_new_tokens": 3})
        assert reply["text"] == "abc"
        stream = engine.async_generate("abc", {"max_new_tokens": 3}, stream=True)
        assert [update["text"] async for update in stream][-1] == "abc"
        awaited = await engine.async_generate("abc", {"max_new_tokens": 3}, stream=True)
        assert [update["text"] async for update in awaited][-1] == "abc"
        await engine.async_abort_request("unknown")
        assert (await engine.async_get_server_info())["version"] == segue.__version__

    asyncio.run(work())


def test_blocking_calls_work_beside_a_running_event_loop(engine: FakeEngine) -> None:
    async def cell() -> Any:  # as in a notebook
        return engine.generate("abc", {"max_new_tokens": 3})

    assert asyncio.run(cell())["text"] == "abc"


def test_many_threads_at_once(engine: FakeEngine) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = engine.generate(f"{number} ", {"max_new_tokens": 20})["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"{number} ".startswith(text[: len(f"{number} ")]) for number, text in texts.items())
    assert len(texts) == 40


def test_abort_gives_what_there_is(engine: FakeEngine, wait_until: Any) -> None:
    stream = engine.generate("abc", LONG, stream=True, rid="mine")
    next(stream)
    engine.abort_request("mine")
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) >= 1


def test_a_cancelled_call_aborts_its_request(engine: FakeEngine) -> None:
    async def work() -> None:
        task = asyncio.ensure_future(engine.async_generate(["abc"] * 8, LONG))
        while engine._runtime.manager.num_requests < 8:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine.pause_generation("in_place")  # it cannot end before it is cancelled
    asyncio.run(asyncio.wait_for(work(), 60))
    engine.continue_generation()


def test_a_rid_in_flight_twice_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with start(tiny_model) as engine:
        stream = engine.generate("abc", LONG, stream=True, rid="same")
        next(stream)
        with pytest.raises(InvalidRequestError, match="'same' is in flight"):
            engine.generate("abc", rid="same")
        engine.abort_request("same")
        list(stream)
        engine.generate("abc", {"max_new_tokens": 1}, rid="same")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "either text or input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "not both"),
        ({"prompt": ""}, "text is empty"),
        ({"prompt": []}, "at least one prompt"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [[1], []]}, "input_ids is empty"),
        ({"input_ids": [1, 99999]}, "99999"),
        ({"prompt": "a", "sampling_params": {"temperature": "hot"}}, "temperature='hot'"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens=-1"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "1 objects for 2 prompts"),
        ({"prompt": ["a", "b"], "rid": ["x"]}, "1 ids for 2 prompts"),
        ({"prompt": "a" * 600}, "maximum context length"),
        ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"prompt": "a", "priority": 10**30}, "priority"),
        ({"prompt": "a", "rid": "x" * 257}, "257 characters"),
        ({"prompt": ["a", "b"], "rid": ["x", "\ud800"]}, "rid='.ud800': must be valid Unicode"),
        ({"input_ids": 5}, "input_ids: expected a list"),
    ],
)
def test_bad_input_is_named(engine: FakeEngine, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        engine.generate(**fields)


@pytest.mark.parametrize(
    "fields", [{"image_data": "x"}, {"sampling_params": {"structural_tag": "{}"}}, {"lora_path": "x"}]
)
def test_what_is_not_supported_is_named(engine: FakeEngine, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError):
        engine.generate("a", **fields)


def test_unknown_fields_are_ignored(engine: FakeEngine) -> None:
    engine.generate("a", {"max_new_tokens": 1, "surprise": 1}, another_surprise=2)


def test_max_new_tokens_is_clamped_to_the_context(engine: FakeEngine) -> None:
    reply = engine.generate("abc", {"max_new_tokens": 100_000})
    assert reply["meta_info"]["completion_tokens"] == 512 - 3
    assert reply["meta_info"]["finish_reason"]["type"] == "length"


def test_server_info_hides_keys(tiny_model: Path) -> None:
    keys = {"api_key": "secret-1", "admin_api_key": "secret-2", "ssl_keyfile_password": "secret-3"}
    with start(tiny_model, **keys) as engine:
        info = engine.get_server_info()
    assert "secret" not in str(info)
    assert info["decided"]["max_seq_len"] == 512
    assert info["internal_states"][0]["req_to_token_pool_used"] == 0


def test_server_info_has_what_the_graphs_of_each_kind_have_cost(engine: FakeEngine) -> None:
    costs = engine.get_server_info()["decided"]["graphs"]
    assert costs == {"decode": {"num_graphs": 3, "seconds": 1.5, "num_bytes": 1 << 20}}


def test_two_engines_in_one_process(engine: FakeEngine, tiny_model: Path) -> None:
    with start(tiny_model) as other:
        streams = [each.generate("abc", {"max_new_tokens": 30}, stream=True) for each in (engine, other)]
        begun = [next(stream) for stream in streams]
        replies = [[first, *stream][-1] for first, stream in zip(begun, streams, strict=True)]
        assert [reply["text"] for reply in replies] == ["abc" * 10] * 2


def test_a_shut_down_engine_says_so(tiny_model: Path) -> None:
    engine = start(tiny_model)
    pids = engine._runtime.worker_pids
    engine.shutdown()
    engine.shutdown()
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.generate("abc")
    with pytest.raises(EngineDeadError, match="was shut down"):
        asyncio.run(engine.async_generate("abc"))


def test_requests_in_flight_end_at_a_shutdown(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    engine = start(tiny_model)
    stream = engine.generate("abc", LONG, stream=True)
    next(stream)
    replies: list[Any] = []
    reader = threading.Thread(target=lambda: replies.extend(stream))
    reader.start()
    engine.shutdown()
    reader.join(60)
    assert replies[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_stream_that_is_not_being_read_at_a_shutdown_says_so(tiny_model: Path) -> None:
    engine = start(tiny_model)
    stream = engine.generate("abc", LONG, stream=True)
    next(stream)
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        list(stream)
    stream.close()


def test_an_async_stream_that_nobody_refers_to_any_more_ends_its_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin_and_forget(engine: FakeEngine) -> None:
        async for _ in engine.async_generate("abc", LONG, stream=True):
            break

    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with start(tiny_model) as engine:
        asyncio.run(begin_and_forget(engine))
        gc.collect()
        assert_nothing_left(engine)
        assert engine._runtime.manager.stats.finished["abort"] == 1


def test_an_async_stream_ends_its_request_when_the_loop_that_read_it_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Any] = []

    async def begin(engine: FakeEngine) -> None:
        streams.append(engine.async_generate("abc", LONG, stream=True))
        await anext(streams[0])

    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    with start(tiny_model) as engine:
        asyncio.run(begin(engine))
        assert_nothing_left(engine)
        assert engine._runtime.manager.stats.finished["abort"] == 1


def test_an_async_stream_that_is_not_being_read_at_a_shutdown_says_so(tiny_model: Path) -> None:
    async def work() -> None:
        engine = start(tiny_model)
        stream = engine.async_generate("abc", LONG, stream=True)
        await anext(stream)
        await engine.async_shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await anext(stream)
        await stream.aclose()

    asyncio.run(work())


def test_a_forgotten_engine_is_closed(tiny_model: Path, wait_until: Any) -> None:
    engine = start(tiny_model)
    pids = engine._runtime.worker_pids
    del engine
    gc.collect()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_an_engine_may_be_forgotten_on_its_own_thread(tiny_model: Path, wait_until: Any) -> None:
    box = [start(tiny_model)]
    thread, pids = box[0]._thread, box[0]._runtime.worker_pids

    async def forget() -> None:
        box.clear()
        gc.collect()

    thread.submit(forget())
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_stream_may_be_forgotten_on_the_engines_thread(engine: FakeEngine) -> None:
    box = [engine.generate("abc", LONG, stream=True)]
    next(box[0])

    async def forget() -> None:
        box.clear()
        gc.collect()

    engine._thread.submit(forget()).result(60)


def test_a_stream_keeps_its_engine_alive(tiny_model: Path) -> None:
    stream = start(tiny_model).generate("abc", {"max_new_tokens": 6}, stream=True)
    gc.collect()
    assert list(stream)[-1]["text"] == "abcabc"


def test_a_workers_death_ends_requests_within_a_second(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    assert least_measured(1.0, partial(seconds_of_a_death, tiny_model)) < 1.0


def seconds_of_a_death(tiny_model: Path) -> float:
    """The time from a worker's death until its request ends with an error."""
    with start(tiny_model) as engine:
        stream = engine.generate("abc", LONG, stream=True)
        next(stream)
        began = time.monotonic()
        os.kill(engine._runtime.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            list(stream)
        seconds = time.monotonic() - began
        with pytest.raises(EngineDeadError):
            engine.generate("abc")
        return seconds


def test_the_death_of_any_rank_is_the_engines(tiny_model: Path) -> None:
    with start(tiny_model, tp=2) as engine:
        os.kill(engine._runtime.worker_pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1"):
            for _ in range(1000):
                engine.generate("abc", LONG)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("fail", OutOfMemoryError, "only 1 page fits"),
        ("exit", EngineStartError, "exit code 7 before it was ready"),
    ],
)
def test_a_failed_start_says_why_and_leaves_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, how: str, kind: type[Exception], words: str
) -> None:
    monkeypatch.setenv("FAKE_START", how)
    threads = threading.active_count()
    with pytest.raises(kind, match=words):
        start(tiny_model)
    assert threading.active_count() <= threads + 1  # a watcher may be about to end


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        FakeEngine(colour="red")
    with pytest.raises(ConfigError, match="tp=0"):
        FakeEngine(tp=0)


def test_an_embedded_engine_has_one_rank(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="embedded"):
        start(tiny_model, embedded=True, tp=2)


@pytest.mark.parametrize("embedded", [True, False])
def test_an_engine_without_a_server_cannot_stand_by(tiny_model: Path, embedded: bool) -> None:
    with pytest.raises(ConfigError, match=r"shadow_mode=True: .*segue serve --shadow-mode"):
        start(tiny_model, embedded=embedded, shadow_mode=True)


SCRIPT = """
import sys, time
sys.path[:0] = {paths!r}
from tests.support.fake_engine import FakeEngine
engine = FakeEngine({model!r}, load_format="dummy", log_level="error")
print(engine._runtime.worker_pids[0], engine._runtime._workers._run_dir.path, flush=True)
print(engine.generate("abc", {{"max_new_tokens": 3}})["text"], "torch" in sys.modules, flush=True)
{rest}
"""


def script(tiny_model: Path, rest: str) -> subprocess.Popen[str]:
    """Started as a user's script: no guard for ``__main__``."""
    text = SCRIPT.format(
        paths=[str(ROOT), str(ROOT / "src")], model=str(tiny_model), rest=textwrap.dedent(rest)
    )
    command = [sys.executable, "-c", text]
    return start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_script_may_end_without_a_shutdown(tiny_model: Path, transformers_imports_torch: bool) -> None:
    with script(tiny_model, "") as process:
        output, errors = process.communicate(timeout=30)
    started, answered = output.splitlines()
    pid, run_dir = started.split(" ", 1)
    text, has_torch = answered.split()
    assert (text, process.returncode, errors) == ("abc", 0, "")
    assert has_torch == str(transformers_imports_torch)
    assert not is_alive(int(pid))
    assert not Path(run_dir).exists()


def test_a_fork_cannot_use_the_engine_and_leaves_it_alone(tiny_model: Path) -> None:
    rest = """
        import os
        if (child := os.fork()) == 0:
            try:
                engine.generate("abc")
            except Exception as error:
                print(error, flush=True)
            sys.exit()
        os.waitpid(child, 0)
        print(engine.generate("de", {"max_new_tokens": 2})["text"])
    """
    with script(tiny_model, rest) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    _, _, told, text = output.splitlines()
    assert "a fork cannot use it" in told
    assert text == "de"


def test_killing_the_parent_ends_its_worker_within_a_second(tiny_model: Path, wait_until: Any) -> None:
    assert least_measured(1.0, partial(seconds_without_a_parent, tiny_model, wait_until)) < 1.0


def seconds_without_a_parent(tiny_model: Path, wait_until: Any) -> float:
    with script(tiny_model, "time.sleep(60)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        assert process.stdout.readline().startswith("abc")
        assert is_alive(pid)
        began = time.monotonic()
        process.kill()
        wait_until(lambda: not is_alive(pid))
        return time.monotonic() - began


def test_ctrl_c_in_a_script_ends_the_call_and_the_worker(tiny_model: Path, wait_until: Any) -> None:
    with script(
        tiny_model, "print('go', flush=True); engine.generate('abc', {'max_new_tokens': 400})"
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        while process.stdout.readline().strip() != "go":
            pass
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
        wait_until(lambda: not is_alive(pid))


def test_ctrl_c_while_an_engine_starts_ends_its_worker(
    tiny_model: Path, tmp_path: Path, wait_until: Any
) -> None:
    text = f"""
        import sys
        sys.path[:0] = {[str(ROOT), str(ROOT / "src")]!r}
        from tests.support.fake_engine import FakeEngine
        print("go", flush=True)
        FakeEngine({str(tiny_model)!r}, load_format="dummy")
    """
    environment = os.environ | {"FAKE_START": "hang", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    with start_child(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task")
        started: list[int] = []

        def find() -> list[int]:
            for file in children.glob("*/children"):
                started.extend(int(pid) for pid in file.read_text().split())
            return started

        wait_until(find)
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        assert b"KeyboardInterrupt" in errors
        assert not is_alive(started[0])
    assert list(tmp_path.iterdir()) == []


def test_the_fake_worker_command_is_the_tests_own() -> None:
    assert segue.Engine._worker_command != FAKE_WORKER
