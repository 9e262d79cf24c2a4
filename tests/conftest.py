"""The environment and the fixtures of all tests. The environment is set before torch is imported."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from hypothesis import settings

from tests.support.polling import rest

# A deadline of a test says that something hangs, and not that the machine is busy.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)
# The imports of all tests make 700,000 objects, through which each collection of garbage would go: 2 s until
# all are imported, and 0.4 s for each later one. See `pytest_collection_finish`.
gc.disable()
# The result of a test must not depend on a user's settings or on the hub.
for _name in [name for name in os.environ if name.startswith("SEGUE_") and name != "SEGUE_CACHE_DIR"]:
    del os.environ[_name]
for _name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):  # the tests' servers are local
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Subprocesses import this source tree, and the same packages as this process.
_ROOT = Path(__file__).resolve().parents[1]
_paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _paths if path)


def take_default_signals() -> None:
    """Restore the default signal handling, if the caller ignores or blocks signals, as shells do for jobs.

    The processes that tests start would inherit the caller's settings, and some tests interrupt them.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


take_default_signals()
settings.register_profile("each run the same", derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """Each run of the short tests has the same examples; `make soak` draws others."""
    if "not slow" in config.option.markexpr:
        settings.load_profile("each run the same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test and its fixtures draw the same numbers of torch, whichever tests its process ran before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no process is left with one of them at the end."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)


def pytest_collection_finish() -> None:
    """What the imports have made stays until the end, and no collection looks at it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def transformers_imports_torch() -> bool:
    """Whether the installed transformers imports torch with a tokenizer, as 5.17 does, and so Segue does."""
    program = "import sys, transformers as t; t.PreTrainedTokenizerFast; print('torch' in sys.modules)"
    return subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "True"


@pytest.fixture(autouse=True)
def log_is_seen_again() -> Iterator[None]:
    """A command or a server that ran in this process keeps the log to itself; later tests look into it.

    Pytest would also see each record of such a logger twice where a test lets it propagate. And what such a
    command wanted to be told, at its level, later tests do not expect.
    """
    yield
    logger = logging.getLogger("segue")
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    logging.captureWarnings(False)
    sys.excepthook = sys.__excepthook__
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if not type(each).__module__.startswith("segue")]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and a configuration, for engines over the fake worker."""
    from tests.support.tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("tiny") / "tiny-model")


def least_seconds(work: Callable[[], object], tries: int = 3) -> float:
    """The least seconds that work takes: a stall of the machine does not come with each try."""
    found = []
    for _ in range(tries):
        began = time.monotonic()
        work()
        found.append(time.monotonic() - began)
    return min(found)


def is_within(seconds: float, work: Callable[[], object], tries: int = 3) -> bool:
    """Whether work takes less than so many seconds, as `least_seconds` measures it; ends with such a try."""
    return any(least_seconds(work, 1) < seconds for _ in range(tries))


def least_measured(below: float, measure: Callable[[], float], tries: int = 3) -> float:
    """The least seconds that ``measure`` returns, which is called again only while none are ``below``.

    It is for a bound on a part of what a test does, as `is_within` is for the whole.
    """
    found: list[float] = []
    while len(found) < tries and not any(each < below for each in found):
        found.append(measure())
    return min(found)


class WaitUntil(Protocol):
    def __call__(self, condition: Callable[[], object], timeout: float = 60.0, what: str = "") -> None: ...


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """Waits for a condition, or fails with its name."""

    def wait(condition: Callable[[], object], timeout: float = 60.0, what: str = "") -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + timeout:
                pytest.fail(f"{what or 'the condition'} did not hold within {timeout:g} s")
            rest(began)

    return wait
