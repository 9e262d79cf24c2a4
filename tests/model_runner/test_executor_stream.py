"""Streams: work runs in order, and never after a failure; what takes long holds nobody up."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from segue.model_runner.executor import ComputeStream, CUDAStream, ForwardOutput


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
    first = stream.submit(lambda: gate.wait(60))
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


class FakeStream:
    """Stands for `torch.Stream` where there is no GPU."""

    current = threading.local()

    def __init__(self, *_, stream_id=7, device_index=0, device_type=1, **__):
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        self._owner = None

    def __enter__(self):
        assert self._owner is None, "the object is current in two threads"
        self._owner = threading.get_ident()
        self.current.id = self.stream_id

    def __exit__(self, *_):
        self._owner = self.current.id = None

    def synchronize(self): ...


@pytest.fixture
def cuda_stream(monkeypatch):
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    stream = CUDAStream(torch.device("cuda", 0))
    yield stream
    stream.close()


def halves(seen, name):
    """Work in two halves, which note their names and streams."""

    def first():
        seen.append((name, FakeStream.current.id))
        return lambda: seen.append((f"rest of {name}", FakeStream.current.id))

    return first


def test_on_cuda_the_second_half_is_launched_before_what_is_submitted_next(cuda_stream):
    seen = []
    first = cuda_stream.submit_halves(halves(seen, "1"), apart=True)
    assert not first.done() and seen == [("1", 7)]
    second = cuda_stream.submit_halves(halves(seen, "2"), apart=True)
    assert first.done() and not second.done()
    cuda_stream.submit(lambda: seen.append(("3", 7))).result(10)
    assert second.done()
    assert cuda_stream.submit_halves(halves(seen, "4"), apart=False).done()
    fifth = cuda_stream.submit_halves(halves(seen, "5"), apart=True)
    cuda_stream.finish()
    cuda_stream.finish()
    assert fifth.done()
    sixth = cuda_stream.submit_halves(halves(seen, "6"), apart=True)
    cuda_stream.submit_long(lambda: seen.append(("7", 7))).result(10)
    assert sixth.done()
    names = [
        "1",
        "rest of 1",
        "2",
        "rest of 2",
        "3",
        "4",
        "rest of 4",
        "5",
        "rest of 5",
        "6",
        "rest of 6",
        "7",
    ]
    assert seen == [(name, 7) for name in names]


def test_a_step_is_read_before_the_rest_of_the_next_one_which_waits_for_its_tokens(cuda_stream):
    seen = []
    outputs = []
    for name in ("1", "2"):
        step = SimpleNamespace(result=partial(seen.append, f"result of {name}"), is_ready=lambda: True)
        rest = lambda name=name, step=step: seen.append(f"rest of {name}") or step  # noqa: E731
        pending = cuda_stream.submit_halves(lambda rest=rest: rest, apart=True)
        outputs.append(ForwardOutput(pending, cuda_stream.finish))
    assert outputs[0].ready()
    outputs[0].result()
    outputs[1].result()
    assert seen == ["rest of 1", "result of 1", "rest of 2", "result of 2"]


def test_on_cuda_a_half_that_fails_ends_its_future_and_all_later_work(cuda_stream):
    def fail():
        raise ValueError("step 3 broke")

    for first in (fail, lambda: fail):
        cuda_stream._failure = None
        broken = cuda_stream.submit_halves(first, apart=True)
        for future in (cuda_stream.submit(lambda: 1), broken):
            with pytest.raises(ValueError, match="step 3 broke"):
                future.result(10)


def test_on_cuda_what_takes_long_does_not_hold_up_the_thread_that_submits_steps(monkeypatch):
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    stream, gate = CUDAStream(torch.device("cuda", 0)), threading.Event()

    def copy_weights():
        assert gate.wait(60), "nothing else ran meanwhile"
        return FakeStream.current.id

    first, second = stream.submit_long(copy_weights), stream.submit_long(lambda: "second")
    assert stream.submit(lambda: FakeStream.current.id).result(timeout=10) == 7
    assert not first.done() and not second.done()
    gate.set()
    assert first.result(timeout=10) == 7, "it is queued on the stream of the steps"
    assert second.result(timeout=10) == "second"
    stream.close()
