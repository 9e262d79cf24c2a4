"""The stream of a CPU: work runs in order on one thread, and never after a failure."""

import threading

import pytest

from segue.model_runner.executor import ComputeStream


@pytest.fixture
def stream():
    stream = ComputeStream()
    yield stream
    stream.close()


def test_work_runs_in_order_on_one_other_thread(stream):
    seen = []
    futures = [stream.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(20)]
    for future in futures:
        future.result(timeout=10)
    assert [i for i, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen} | {threading.get_ident()}) == 2


def test_submitting_does_not_wait(stream):
    gate = threading.Event()
    first = stream.submit(lambda: gate.wait(10))
    second = stream.submit(lambda: 5)
    assert not first.done() and not second.done()
    gate.set()
    assert second.result(timeout=10) == 5


def test_after_a_failure_later_work_fails_with_the_same_error(stream):
    ran = []

    def fail():
        raise ValueError("step 3 broke")

    first, second = stream.submit(fail), stream.submit(lambda: ran.append(1))
    for future in (first, second):
        with pytest.raises(ValueError, match="step 3 broke"):
            future.result(timeout=10)
    assert ran == []


def test_close_finishes_submitted_work():
    stream = ComputeStream()
    seen = []
    for i in range(5):
        stream.submit(lambda i=i: seen.append(i))
    stream.close()
    assert seen == [0, 1, 2, 3, 4]
