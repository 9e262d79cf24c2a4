"""Sends the worst bodies to the real server: none may keep it from answering ``/health``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.bodies import BODIES, LIMIT, ServerSizes
from tests.attack.stalls import measure, sizes_of
from tests.support.child import start_child
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.alone

FAKE_SERVER = Path(__file__).resolve().parent.parent / "server" / "fake_server.py"
LONGEST_S = 0.1
TRIES = 3  # a stall of the server occurs in every try, a stall of the machine does not
# The sizes of a real model: with those of the tiny model, most bodies would be refused by the first check.
CONTEXT, VOCABULARY = 8192, 151_936


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny-model")
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    (model / "config.json").write_text(json.dumps(config))
    options = {
        "model": str(model),
        "load_format": "dummy",
        "port": 0,
        "log_level": "error",
        "max_model_len": CONTEXT,
        "num_kv_tokens": 16 * CONTEXT,
        "chunked_prefill_size": CONTEXT,
        "max_running_requests": 64,
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with start_child(
        [sys.executable, str(FAKE_SERVER), json.dumps(options)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            lines = (line for line in server.stdout if line.startswith("ready "))
            yield next(lines).split()[1]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def sizes(url: str) -> ServerSizes:
    return sizes_of(url)


@pytest.mark.parametrize("name", BODIES)
def test_health_is_answered_while_the_server_works_on_a_body(url: str, sizes: ServerSizes, name: str) -> None:
    body = BODIES[name](sizes)
    assert len(body[1]) <= LIMIT
    longest = []
    for _ in range(TRIES):
        found = measure(url, body)
        assert found.status in (200, 400), found
        assert found.refused == 0, found
        longest.append(found.longest)
        if found.longest <= LONGEST_S:
            return
    raise AssertionError(f"{name}: /health took {[round(each * 1e3) for each in longest]} ms")
