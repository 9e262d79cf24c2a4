"""The HTTP benchmarks from end to end: servers are started, loaded, compared and stopped."""

import json
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from bench import http_compare, intrusion, launch, report, serving
from bench.model_dir import with_tokenizer
from segue.bench import load
from segue.checkpoint.source import read_json
from segue.frontend.detokenizer import TokenTable
from segue.frontend.tokenizer import Tokenizer
from tests.server import fake_server
from tests.server.live import LiveServer
from tests.support.tiny_model import CONFIG, write_model


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "a model").mkdir()
    config = CONFIG | {"vocab_size": 1000, "max_position_embeddings": 20_000}
    (tmp_path / "a model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "a model"


def test_every_token_of_the_artificial_tokenizer_is_complete_text(model):
    with with_tokenizer(model) as directory:
        assert read_json(directory / "config.json")["vocab_size"] == 1000
        tokenizer = Tokenizer.load(directory)
        with with_tokenizer(directory) as same:
            assert same == directory
    assert [file.name for file in model.iterdir()] == ["config.json"]
    table = TokenTable.of(tokenizer.backend, tokenizer.special_ids, 1000)
    assert len(table.tokens) == tokenizer.vocab_size == 1000
    assert all(table.pieces)
    assert len(set(table.pieces)) == 1000
    assert tokenizer.decode(tokenizer.encode("Hello 7!")) == "Hello 7!"


@pytest.mark.slow
@pytest.mark.timeout(300)  # two servers, four loads each
def test_two_servers_are_compared_part_by_part(model, results, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_STEP_S", "0.003")
    options = '{"model": "{model}", "port": {port}, "load_format": "dummy", "log_level": "error"}'
    command = f"{sys.executable} {fake_server.__file__} '{options}'"
    for module, name, value in (
        (http_compare, "WARM_UP_S", 0.3),
        (http_compare, "CONCURRENCY", 8),
        (intrusion, "SETTLE_S", 0.1),
        (load, "LEAD_S", 0.3),
        (http_compare, "Intrusion", partial(intrusion.Intrusion, decodes=4, decode_tokens=300, repeats=1)),
        (http_compare, "Lengths", partial(load.Lengths, prompt=(5, 50), output=(4, 40))),
    ):
        monkeypatch.setattr(module, name, value)
    arguments = "--saturation 8 --saturate-seconds 0.5 --load-seconds 1 --processes 1 --max-id 900"
    argv = [
        "http_compare",
        str(model),
        *arguments.split(),
        "--long-prompt=200",
        "--chunk=100",
        f"--theirs={command}",
        f"--ours={command}",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    http_compare.main()
    found = json.loads((results / "gpu_http.json").read_text())["sides"]
    assert list(found) == ["theirs", "ours"]
    for side in found.values():
        assert side["exceptions"] == {}
        assert list(side["loads"]) == ["saturated", "50%", "80%"]
        assert [load["failed"] for load in side["loads"].values()] == [0, 0, 0]
        assert side["loads"]["80%"]["rate"] == 6.4
        assert side["loads"]["80%"]["requests"] > 0
        assert side["long_prompt"]["allowed_gap_s"] > 0
    assert len(http_compare.bars(found["ours"], found["theirs"])) == 7
    ElementTree.parse(results / "gpu_http.svg")
    assert "first token, p50, at 50%" in capsys.readouterr().out


def test_the_exception_of_a_server_that_does_not_start_is_stored(model, results, monkeypatch):
    argv = ["http_compare", str(model), "--theirs=false", "--ours=false"]
    monkeypatch.setattr(sys, "argv", argv)
    assert http_compare.main() == 1
    found = json.loads((results / "gpu_http.json").read_text())["sides"]
    for side in found.values():
        assert "exit code 1 before it was ready" in side["exceptions"]["server"]


def test_bars_are_ratios_of_medians_and_tails():
    def side(p50, p99):
        load = {"ttft_s": {"p50": p50}, "gap_s": {"p99": p99}, "failed": 0, "unfinished": 0}
        return {"loads": {"50%": load, "80%": load}}

    found = http_compare.bars(side(0.006, 0.009), side(0.010, 0.010))
    ratios = [(round(value, 3), bar) for label, value, bar in found if "ours over theirs" in label]
    assert ratios == [(0.6, 0.7), (0.9, 0.8)] * 2
    scene = {"long_prompt": {"worst_gap_s": [0.1, 0.3], "allowed_gap_s": 0.2}}
    assert http_compare.bars({"loads": {}, **scene}, {"loads": {}}) == [
        ("longest gap at a long prompt, s", 0.3, 0.2)
    ]


def test_a_server_that_is_fast_because_it_refuses_requests_misses_its_bars():
    load = {"ttft_s": {"p50": 0.01}, "gap_s": {"p99": 0.01}, "failed": 0, "unfinished": 0}
    refusing = load | {"failed": 90, "ttft_s": {"p50": 0.001}}
    found = http_compare.bars(
        {"loads": {"50%": refusing, "80%": load}}, {"loads": {"50%": load, "80%": load}}
    )
    assert [(label, value) for label, value, bar in found if bar == 0] == [
        ("failed or unfinished, at 50%", 90),
        ("failed or unfinished, at 80%", 0),
    ]


def test_a_single_server_that_does_not_start_is_a_failure(model, results, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["http_compare", str(model), "--ours=false"])
    assert http_compare.main() == 1


LEAVES_A_CHILD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_child_that_a_server_leaves_is_killed(wait_until):
    port = launch.free_port()
    url = f"http://127.0.0.1:{port}"
    with launch.running([sys.executable, "-c", LEAVES_A_CHILD, str(port)], url) as seconds:
        pid = int(httpx.get(url).text)
        assert _runs(pid)
        assert seconds > 0
    wait_until(lambda: not _runs(pid), what="the end of the server's child")


def test_a_server_that_never_answers_times_out():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    url = f"http://127.0.0.1:{launch.free_port()}"
    with (
        pytest.raises(TimeoutError, match=r"not ready after 0\.2 s"),
        launch.running(command, url, start_timeout=0.2),
    ):
        pass


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_running_server_is_measured_from_the_command_line(tmp_path, results, monkeypatch):
    with LiveServer(write_model(tmp_path / "tiny-model")) as server:
        arguments = "--rate 10 --rate 20 --seconds 1 --prompt 3 20 --output 2 9 --max-id 300 --processes 1"
        monkeypatch.setattr(sys, "argv", ["serving", server.url, *arguments.split()])
        assert serving.main() == 0
        server.assert_nothing_left()
    found = json.loads((results / "serving.json").read_text())
    assert [run["rate"] for run in found["rates"]] == [10, 20]
    assert found["rates"][1]["requests"] > 5
    ElementTree.parse(results / "serving.svg")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("http://h:1 --rate 0", "0: must be above 0"),
        ("http://h:1 --rate 1 --burstiness -1", "-1: must be above 0"),
        ("http://h:1 --rate 1 --prompt 20 3", "--prompt: give MIN and MAX"),
        ("http://h:1 --rate 1 --text --long-prompt 5", "cannot be combined with --text"),
        ("ftp://h:1 --rate 1", "must be a server's URL"),
        ("http://h:1?model=x --rate 1", "must be a server's URL"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serving", *arguments.split()])
    with pytest.raises(SystemExit):
        serving.main()
    assert error in capsys.readouterr().err


def test_the_base_url_of_openai_clients_is_accepted():
    assert serving.base_url("http://h:1/v1/") == serving.base_url("http://h:1") == "http://h:1"
