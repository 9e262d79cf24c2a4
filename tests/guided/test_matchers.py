"""Masks against every token of a small vocabulary; the languages are finite, so that all texts are known."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from segue.guided.follower import NO_VOCABULARY
from segue.guided.matchers import Allowed, Matchers
from segue.guided.processes import ProcessMatchers, _Running, count_for
from segue.messages.guided import GrammarSpec, GuidedVocabulary, LostGuide
from segue.messages.requests import SamplingParams
from tests.conftest import WaitUntil

WORDS = [
    b"ab",
    b"abc",
    b"cd",
    b'"a',
    b'":',
    b'{"',
    b"true",
    b"tr",
    b"[]",
    "é".encode(),
    b"\xc3",
    b"\xa9",
    b"12",
]
TOKENS = [b"<end>", b"<pad>", *WORDS, *[bytes([byte]) for byte in range(0x20, 0x7F)], b"", b"\n", b"\x7f"]
EOS = 0
SIZE = len(TOKENS)
SPACELESS = {"x-guidance": {"whitespace_flexible": False}}


def spec(kind: str, value: object) -> GrammarSpec:
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value))  # type: ignore[arg-type]


def words(alphabet: Sequence[str], lengths: range, prefix: str = "") -> set[str]:
    return {prefix + "".join(each) for n in lengths for each in itertools.product(alphabet, repeat=n)}


MANY = ["abc", "abd", "ab", "x y", 'a"b\\', "é", "\n", "a\x7f"]
DIGITS = "0123456789"
LISTS = {
    "[" + ",".join(each) + "]" for n in range(4) for each in itertools.product(("1", "12", "2"), repeat=n)
}
LANGUAGES = [
    (spec("choice", MANY), set(MANY)),
    (spec("regex", "[abc]{1,4}"), words(("a", "b", "c"), range(1, 5))),
    (spec("regex", "^(cd|c){1,6}$"), words(("cd", "c"), range(1, 7))),
    (spec("grammar", 'root ::= "a" x | "b"\nx ::= [0-9] [0-9]?'), {"b", *words(DIGITS, range(1, 3), "a")}),
    (spec("grammar", 'start: "(" start ")" | "a"'), {"(" * n + "a" + ")" * n for n in range(99)}),
    (
        spec("json_schema", {"enum": [True, 1, "ab", [], {"a": 12}], **SPACELESS}),
        {"true", "1", '"ab"', "[]", '{"a":12}'},
    ),
    (
        spec("json_schema", {"type": "array", "items": {"enum": [1, 12, 2]}, "maxItems": 3, **SPACELESS}),
        LISTS,
    ),
]


def table() -> np.ndarray:
    """Masks of ten slots, as an engine has them that has run for a while."""
    return np.random.default_rng(0).integers(-(2**31), 2**31, (10, (SIZE + 31) // 32)).astype(np.int32)


VOCABULARY = GuidedVocabulary(tokens=TOKENS, special_ids=[0, 1], eos_ids=[EOS])


def shared_table() -> tuple[int, np.ndarray]:
    """The same in memory that other processes can map, and its descriptor."""
    masks = table()
    descriptor = os.memfd_create("masks")
    os.ftruncate(descriptor, masks.nbytes)
    shared = np.frombuffer(mmap.mmap(descriptor, masks.nbytes), dtype=np.int32).reshape(masks.shape)
    shared[:] = masks
    return descriptor, shared


@pytest.fixture(scope="module", params=["thread", "processes"])
def made(request: pytest.FixtureRequest) -> Iterator[Matchers]:
    if request.param == "thread":
        made = Matchers(table())
    else:
        descriptor, masks = shared_table()
        made = ProcessMatchers(masks, descriptor, 2)
    made.set_vocabulary(VOCABULARY)
    yield made
    made.close()


@pytest.fixture
def matchers(made: Matchers) -> Iterator[Matchers]:
    yield made
    made.forget(range(10))


def put(
    matchers: Matchers, slot: int, grammar: GrammarSpec, outputs: tuple[int, ...] = (), **params: object
) -> None:
    matchers.put(slot, SamplingParams(max_new_tokens=99, grammar=grammar, **params), outputs)  # type: ignore[arg-type]


def allowed(matchers: Matchers, *slots: int) -> Allowed:
    found = matchers.allowed(np.array(slots))
    assert found is not None
    return found


def tokens_of(mask: np.ndarray) -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE].nonzero()[0].tolist())


def expected(language: set[bytes], text: bytes) -> set[int]:
    """All tokens after which the text can still become one of the language."""
    going_on = {
        index
        for index, token in enumerate(TOKENS)
        if index > 1 and token and any(each.startswith(text + token) for each in language)
    }
    return going_on | ({EOS} if text in language else set())


@pytest.mark.parametrize(("grammar", "texts"), LANGUAGES, ids=[each.text for each, _ in LANGUAGES])
def test_a_mask_has_exactly_the_tokens_that_the_language_allows(
    matchers: Matchers, grammar: GrammarSpec, texts: set[str]
) -> None:
    language, rng, exact = {text.encode() for text in texts}, random.Random(1), 0
    for _ in range(12):
        put(matchers, 3, grammar)
        text = b""
        while True:
            (mask,) = allowed(matchers, 3).masks
            found, all_of_them = tokens_of(mask), expected(language, text)
            next_bytes = {TOKENS[index][:1] for index in all_of_them}
            if len(next_bytes) > 1:
                assert found == all_of_them, text
                exact += 1
            else:  # where the next text is clear, one way to write it may be chosen
                assert found and found <= all_of_them, text
            token = rng.choice(sorted(found))
            if token == EOS:
                break
            text += TOKENS[token]
            matchers.take(np.array([3]), lambda token=token: [token])
        assert text in language
    assert exact > 10


def test_it_goes_on_behind_outputs_as_if_they_had_been_drawn_here(matchers: Matchers) -> None:
    grammar = spec("regex", "[abc]{5}")
    put(matchers, 0, grammar)
    drawn = [TOKENS.index(b"ab"), TOKENS.index(b"c")]
    for token in drawn:
        matchers.take(np.array([0]), lambda token=token: [token])
    put(matchers, 1, grammar, tuple(drawn))
    first, second = allowed(matchers, 0, 1).masks
    assert (first == second).all()
    assert tokens_of(first) == expected({each.encode() for each in words("abc", range(5, 6))}, b"abc")


def test_rows_of_a_step_are_guided_each_by_its_own_grammar_or_not_at_all(matchers: Matchers) -> None:
    put(matchers, 5, spec("choice", ["x"]))
    put(matchers, 2, spec("choice", ["y"]))
    assert matchers.allowed(np.array([0, 1])) is None
    found = allowed(matchers, 2, 0, 5)
    assert found.rows.tolist() == [0, 2]
    assert [tokens_of(mask) for mask in found.masks] == [{TOKENS.index(b"y")}, {TOKENS.index(b"x")}]
    matchers.put(5, SamplingParams(max_new_tokens=1), ())  # the slot's next request is not guided
    assert allowed(matchers, 2, 0, 5).rows.tolist() == [0]


def test_tokens_are_awaited_in_the_thread_and_masks_by_whoever_samples(matchers: Matchers) -> None:
    put(matchers, 0, spec("regex", "[ab]{1,3}"))
    allowed(matchers, 0)
    known, masks = threading.Event(), list[Allowed]()

    def read() -> list[int]:
        assert known.wait(60)
        return [TOKENS.index(b"ab")]

    matchers.take(np.array([0]), read)
    reader = threading.Thread(target=lambda: masks.append(allowed(matchers, 0)))
    reader.start()
    assert not masks
    known.set()
    reader.join(60)
    assert tokens_of(masks[0].masks[0]) == {EOS, TOKENS.index(b"a"), TOKENS.index(b"b")}
    phases = matchers.median_ms()
    assert list(phases) == ["tokens", "consume", "masks", "wait", "launch"] and min(phases.values()) >= 0


def test_rows_whose_grammars_are_complete_are_known_with_their_token(matchers: Matchers) -> None:
    for slot, regex in enumerate(("a", "a+", "ab?", "aab")):
        put(matchers, slot, spec("regex", regex))
    a, slots = TOKENS.index(b"a"), np.array([3, 0, 1, 2, 9])
    complete = matchers.take(slots, lambda: [a] * 5)
    assert complete is not None and complete.result() == [1]
    assert matchers.take(np.array([9]), lambda: [a]) is None


def test_a_late_eos_waits_until_nothing_else_is_left(matchers: Matchers) -> None:
    put(matchers, 0, spec("regex", "a{1,2}"), late_eos=True)
    a, found = TOKENS.index(b"a"), []
    for _ in range(3):
        found.append(tokens_of(allowed(matchers, 0).masks[0]))
        matchers.take(np.array([0]), lambda: [a])
    assert found == [{a}, {a}, {EOS}]


def test_a_step_that_was_planned_before_an_end_changes_nothing(matchers: Matchers) -> None:
    put(matchers, 0, spec("regex", "a+"))
    for token in (TOKENS.index(b"a"), EOS, 9, -1):
        allowed(matchers, 0)
        matchers.take(np.array([0]), lambda token=token: [token])
    assert not allowed(matchers, 0).failures


def test_outputs_that_the_grammar_does_not_have_fail_alone(matchers: Matchers) -> None:
    put(matchers, 0, spec("regex", "a+"), [9])
    put(matchers, 1, spec("choice", ["x"]))
    found = allowed(matchers, 0, 1)
    assert list(found.failures) == [0] and "doesn't satisfy the grammar" in found.failures[0]
    assert tokens_of(found.masks[1]) == {TOKENS.index(b"x")}
    matchers.take(np.array([0]), lambda: [9])  # of a step that was planned before the end
    assert list(allowed(matchers, 0, 1).failures) == [0]
    put(matchers, 0, GrammarSpec("json_schema", "{"))  # which no frontend lets through
    found = allowed(matchers, 0, 1)
    assert list(found.failures) == [0] and (found.masks[0] == -1).all()
    assert tokens_of(found.masks[1]) == {TOKENS.index(b"x")}
    put(matchers, 0, spec("grammar", "start: start"))
    assert allowed(matchers, 0).failures == {0: "no token of this model goes on with a text of the grammar"}


def test_what_would_keep_a_step_waiting_fails_instead(matchers: Matchers) -> None:
    put(matchers, 0, spec("regex", "((a{60}){60}){60}"))
    put(matchers, 1, spec("json_schema", {"enum": [str(number) for number in range(7000)]}))
    failures, text = allowed(matchers, 0, 1).failures, '"6999"'
    for char in text:
        drawn = [TOKENS.index(b"a"), TOKENS.index(char.encode())]
        matchers.take(np.array([0, 1]), partial(list, drawn))
        failures = allowed(matchers, 0, 1).failures
    assert list(failures) == [0] and "too many" in failures[0]


def test_without_its_vocabulary_only_guided_requests_fail() -> None:
    made = Matchers(table())
    made.set_vocabulary(GuidedVocabulary(tokens=TOKENS, special_ids=[], eos_ids=[]))
    put(made, 0, spec("regex", "a"))
    assert allowed(made, 0).failures == {0: "the vocabulary of this model cannot be used for it"}
    made.close()


def test_a_step_whose_tokens_cannot_be_read_is_an_error_for_all_who_need_them() -> None:
    descriptor, masks = shared_table()
    for made in (Matchers(table()), ProcessMatchers(masks, descriptor, 1)):
        put(made, 3, spec("regex", "a"))  # a step before the vocabulary is known, as at the start
        assert (
            allowed(made, 3).failures == {0: NO_VOCABULARY}
            and (made.allowed(np.array([3])).masks == -1).all()
        )
        before = made.take(np.array([3]), lambda: [9])
        assert before is not None and before.result() == []
        made.set_vocabulary(VOCABULARY)
        put(made, 3, spec("regex", "a+"))
        allowed(made, 3)
        broken = made.take(np.array([3]), lambda: [][0])
        assert broken is not None
        with pytest.raises(IndexError):
            broken.result()
        with pytest.raises(IndexError):
            allowed(made, 3)
        made.close()


def test_slots_and_tokens_of_many_steps_reach_the_processes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they have fallen asleep, and where slots are given to other requests."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    descriptor, masks = shared_table()
    made, rng = ProcessMatchers(masks, descriptor, 2), random.Random(0)
    made.set_vocabulary(VOCABULARY)
    texts, alone = dict[int, bytes](), {b"".join(each) for each in itertools.product([b"a", b"b"], repeat=5)}
    for step in range(100):
        for slot in rng.sample(range(10), 2) if step % 3 == 0 else ():
            if rng.random() < 0.3:
                made.forget([slot])
                texts.pop(slot, None)
            else:
                put(made, slot, spec("regex", "[ab]{5}"), (TOKENS.index(b"b"),))
                texts[slot] = b"b"
        slots = rng.sample(range(10), 7)
        found = made.allowed(np.array(slots))
        guided = [slot for slot in slots if slot in texts]
        if found is None:
            assert not guided
            continue
        assert [slots[row] for row in found.rows.tolist()] == guided and not found.failures
        tokens = dict[int, int]()
        for slot, mask in zip(guided, found.masks, strict=True):
            assert tokens_of(mask) == expected(alone, texts[slot])
            tokens[slot] = TOKENS.index(rng.choice([b"a", b"b"])) if len(texts[slot]) < 5 else EOS
        drawn = [tokens.get(slot, 9) for slot in slots]
        taken = made.take(np.array(slots), partial(list, drawn))
        for slot, token in tokens.items():
            texts[slot] += TOKENS[token] if token != EOS else b""
        if rng.random() < 0.5:
            assert taken is not None
            complete = [row for row, slot in enumerate(slots) if tokens.get(slot, EOS) != EOS]
            assert taken.result() == [row for row in complete if len(texts[slots[row]]) == 5]
        if step == 60:
            assert made._running is not None
            board, deadline = made._running.board, time.monotonic() + 60
            while not board.asleep[:, 0].all():
                assert time.monotonic() < deadline, "they do not fall asleep"
                time.sleep(0.005)
    running = made._running
    assert running is not None
    tasks = [os.listdir(f"/proc/{each.pid}/task") for each in running.processes]
    assert list(map(len, tasks)) == [1, 1], "a process has threads that do nothing"
    for connection in running.connections:  # as when the worker ends
        connection.close()
    assert [each.wait(60) for each in running.processes] == [0, 0]
    made.close()


def test_guided_requests_may_begin_once_the_processes_are_ready(wait_until: WaitUntil) -> None:
    assert Matchers(table()).can_begin()
    descriptor, masks = shared_table()
    made = ProcessMatchers(masks, descriptor, 2)
    assert made.can_begin(), "there is nothing to wait for without a vocabulary"
    made.set_vocabulary(VOCABULARY)
    assert not made.can_begin()
    kill(made, 1)
    assert not made.can_begin() and made._running is None, "it ended before it was ready"
    wait_until(made.can_begin, what="the processes that are started again are ready")
    assert made._running is not None and made._running.board.ready[:, 0].tolist() == [1, 1]
    made._give_up(made._running)
    made._next_start = float("inf")
    assert made.can_begin(), "in a pause guided requests may come, and fail"
    made.close()


@pytest.mark.parametrize("what", ["wait", "asleep", "put"])
def test_guided_requests_that_run_fail_where_a_process_has_ended(what: str) -> None:
    descriptor, masks = shared_table()
    made = ProcessMatchers(masks, descriptor, 2)
    made.set_vocabulary(VOCABULARY)
    for slot in (0, 1):
        put(made, slot, spec("regex", "a+"))
    assert not allowed(made, 0, 1).failures
    killed = kill(made, 1)
    masks[:3] = 0  # as far as it came
    if what == "asleep":
        killed.board.asleep[1] = 1
    taken = made.take(np.array([0, 1]), lambda: [TOKENS.index(b"a")] * 2)
    if what != "put":
        assert taken is not None and taken.result() == []
    if what == "put":  # it ends with the messages to it
        put(made, 3, spec("regex", "b" * 1000))
    found = allowed(made, 0, 2, 1)
    reason = "a process that follows grammars has ended by signal SIGKILL, perhaps because memory ran out"
    assert found.failures == {0: reason, 2: reason} and (found.masks == -1).all()
    assert {type(why) for why in found.failures.values()} == {LostGuide}
    assert all(each.returncode is not None for each in killed.processes)
    made._last_step = 99
    put(made, 4, spec("regex", "bb"))  # the other guides are lost for good
    for complete in ([], [2]):
        found = allowed(made, 0, 1, 4)
        assert found.failures == {0: reason, 1: reason} and tokens_of(found.masks[2]) == {TOKENS.index(b"b")}
        taken = made.take(np.array([0, 1, 4]), lambda: [TOKENS.index(b"b")] * 3)
        assert taken is not None and taken.result() == complete
    made.close()


def test_steps_of_requests_that_have_lost_their_places_do_not_wait_for_the_next_processes() -> None:
    descriptor, masks = shared_table()
    made = ProcessMatchers(masks, descriptor, 1)
    made.set_vocabulary(VOCABULARY)
    put(made, 0, spec("regex", "a+"))
    assert not allowed(made, 0).failures
    made.take(np.array([0]), lambda: [TOKENS.index(b"a")])
    kill(made, 0)
    assert list(allowed(made, 0).failures) == [0]
    assert not made.can_begin() and made._running is not None
    made._running.processes[0].send_signal(signal.SIGSTOP)  # however long it takes to be ready
    with ThreadPoolExecutor(1) as thread:
        taken = made.take(np.array([0]), lambda: [TOKENS.index(b"a")])
        assert taken is not None
        try:
            assert list(thread.submit(allowed, made, 0).result(60).failures) == [0]
            assert thread.submit(taken.result).result(60) == []
        finally:
            made.close()


def kill(made: ProcessMatchers, index: int) -> _Running:
    """Kill a process, and return it with the others."""
    running = made._running
    assert running is not None
    running.processes[index].kill()
    running.processes[index].wait()
    return running


def test_processes_that_end_again_and_again_are_started_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptor, masks = shared_table()
    made = ProcessMatchers(masks, descriptor, 1)
    made.set_vocabulary(VOCABULARY)
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    for _ in range(2):
        put(made, 0, spec("regex", "a+"))
        assert not allowed(made, 0).failures
        taken = made.take(np.array([0]), lambda: [TOKENS.index(b"a")])
        kill(made, 0)
        assert taken is not None and taken.result() == []
    put(made, 1, spec("regex", "b"))
    found = allowed(made, 0, 1)
    assert list(found.failures) == [0, 1] and (found.masks == -1).all()
    now += 0.6
    put(made, 1, spec("regex", "b"))
    assert list(allowed(made, 0, 1).failures) == [0]
    made.close()


def test_where_no_process_can_be_started_only_guided_requests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, masks = shared_table()
    made, before, started = ProcessMatchers(masks, descriptor, 2), os.listdir("/proc/self/fd"), list[object]()

    def refuse(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(popen(*args, **kwargs))  # type: ignore[call-overload]
        return started[0]  # type: ignore[return-value]

    popen = subprocess.Popen
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        made.set_vocabulary(VOCABULARY)
        made._next_start = float("inf")
        put(made, 3, spec("regex", "a"))
    (failure,) = allowed(made, 3).failures.values()
    assert "Resource temporarily unavailable" in failure
    assert started[0].returncode is not None and os.listdir("/proc/self/fd") == before  # type: ignore[attr-defined]
    made._next_start = 0.0
    put(made, 3, spec("regex", "a"))
    assert not allowed(made, 3).failures
    made.close()


def test_there_are_processes_where_cores_are_left_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [count_for("cuda", cores, cores) for cores in (2, 4, 16, 64)] == [0, 1, 4, 4]
    assert [count_for("cuda", 64, share) for share in (1, 8, 64)] == [1, 2, 4], "eight engines of 64 cores"
    assert count_for("cpu", 64, 64) == 0
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert count_for("cuda", 64, 64) == 0
