from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

import segue
from segue.api.engine import Engine
from segue.checkpoint.gguf import convert
from segue.cli import main, serving
from segue.cli.remote import RemoteError
from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.server import lifecycle
from tests.server.live import LiveServer
from tests.support.child import start_child
from tests.support.fake_engine import FAKE_WORKER
from tests.support.tiny_model import write_model

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "tiny-model")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Returns the configurations that `segue serve` was started with; no server runs."""
    configs: list[EngineConfig] = []

    async def serve(config: EngineConfig, listener: socket.socket, *_: Any, **__: Any) -> int:
        listener.close()
        configs.append(config)
        return 0

    monkeypatch.setattr(lifecycle, "serve", serve)
    return configs


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> list[str]:
    """Returns flags that start the fake worker on the tiny model."""
    monkeypatch.setattr(Engine, "_worker_command", FAKE_WORKER)
    return ["--model", str(tiny_model), "--load-format", "dummy"]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def type_(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return type_


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, which must leave no files and no processes."""
    command = [sys.executable, "-m", "segue", *arguments]
    with tempfile.TemporaryDirectory() as scratch:
        variables = os.environ | {"TMPDIR": scratch}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        assert list(Path(scratch).iterdir()) == []
        assert not processes_with(f"TMPDIR={scratch}")
    return result


def processes_with(variable: str) -> list[str]:
    """Returns the ids of the processes whose environment has the variable."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.append(file.parent.name)
    return found


def test_version() -> None:
    assert RUNNER.invoke(main.app, ["--version"]).output.strip() == f"segue {segue.__version__}"


def test_every_option_is_a_flag_of_serve_under_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    output = RUNNER.invoke(main.app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    for option in fields(EngineConfig):
        assert f"--{option.name.replace('_', '-')} " in output
        assert f"SEGUE_{option.name.upper()}" in output
        assert f" {option.metadata['group']} " in output


def test_commands_without_a_server_have_no_server_options() -> None:
    output = RUNNER.invoke(main.app, ["generate", "--help"], env={"COLUMNS": "300"}).output
    assert "--max-model-len " in output
    assert "--port " not in output


def test_flags_reach_the_configuration(served: list[EngineConfig]) -> None:
    flags = [
        "--port",
        "0",
        "--dtype",
        "float32",
        "--disable-overlap",
        "--memory-ratio",
        "0.5",
        "--max-model-len",
        "64",
    ]
    assert RUNNER.invoke(main.app, ["serve", *flags]).exit_code == 0
    (config,) = served
    assert (config.dtype, config.disable_overlap, config.memory_ratio, config.max_model_len) == (
        "float32",
        True,
        0.5,
        64,
    )


def test_the_environment_sets_options_without_a_flag(
    served: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEGUE_TP", "3")
    monkeypatch.setenv("SEGUE_PORT", "0")
    monkeypatch.setenv("SEGUE_HOST", "127.0.0.2")
    assert RUNNER.invoke(main.app, ["serve", "--host", "127.0.0.1"]).exit_code == 0
    assert (served[0].tp, served[0].host) == (3, "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--page-size", "0"], "page_size=0: must be at least 1"),
        (["serve", "--model", "/no/such/model", "--port", "0"], "/no/such/model"),
        (["generate", "--model", "/no/such/model", "hello"], "/no/such/model"),
        (["chat", "--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["pause", "--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("segue: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--model", "/no/such/model", "--port", str(port))
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr


def test_ctrl_c_raises_no_exception_while_a_server_imports_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def bind(host: str, port: int) -> socket.socket:
        seen.append(signal.getsignal(signal.SIGINT))
        raise ConfigError("that is enough")

    monkeypatch.setattr(serving, "bind", bind)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        CliRunner().invoke(main.app, ["serve"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL]


def test_a_cache_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("generate", "hello", "--cache-dir", str(tmp_path / "file" / "cache"))
    assert result.returncode == 1
    assert "cache" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_broken_model_file_is_named(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 this is no json ")
    result = run("generate", "hello", "--model", str(tmp_path / "broken"))
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert result.stderr.startswith("segue: ")


def test_a_truncated_model_file_is_named_with_its_tensor(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "short")
    values = np.zeros((320, 64), np.float32)
    save_file({"model.embed_tokens.weight": values}, model / "model.safetensors")
    os.truncate(model / "model.safetensors", 1000)
    result = run("generate", "hello", "--model", str(model))
    assert result.returncode == 1
    assert "model.safetensors is truncated: tensor 'model.embed_tokens.weight'" in result.stderr
    assert result.stderr.startswith("segue: ")


def test_an_unsupported_architecture_lists_the_supported_ones(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OtherForCausalLM"))
    result = run("serve", "--model", str(tmp_path / "other"), "--port", "0")
    assert result.returncode == 1
    assert "OtherForCausalLM" in result.stderr
    assert "LlamaForCausalLM" in result.stderr


def test_too_little_memory_is_named(tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--num-kv-tokens", "1"]
    result = run("generate", "hello", *flags)
    assert result.returncode == 1
    assert "num-kv-tokens" in result.stderr or "num_kv_tokens" in result.stderr


def test_generate_prints_the_text(fake_engine: list[str]) -> None:
    result = RUNNER.invoke(main.app, ["generate", "abc", *fake_engine, "--max-tokens", "6"])
    assert (result.exit_code, result.stdout) == (0, "abcabc\n")


def test_chat_keeps_the_conversation_until_reset(
    fake_engine: list[str], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("/help", "/what", "abc", "", "de", "/reset", "fg", "/exit")
    main.app(["chat", *fake_engine, "--max-tokens", "60"], standalone_mode=False)
    output = capsys.readouterr().out
    assert "/reset  " in output
    assert "unknown command /what" in output
    first, second, third = re.findall(r"user\n(?:.*\n)*?.*?(?=\n\d+\.\d s)", output)
    assert first == "user\nabc"
    assert second.startswith("user\nabc")  # the conversation so far is sent again
    assert third == "user\nfg"


def test_chat_ends_at_the_end_of_its_input(fake_engine: list[str], typed: Any) -> None:
    typed()
    main.app(["chat", *fake_engine], standalone_mode=False)


def test_chat_with_a_server(tiny_model: Path, typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer(tiny_model, api_key="secret") as server:
        typed("abc", "refuse", "/exit")
        main.app(["chat", "--url", server.url, "--key", "secret"], standalone_mode=False)
        output = capsys.readouterr().out
        assert "tiny-model" in output
        assert "user\nabc" in output
        assert "refused by the template" in output
        server.assert_nothing_left()


def test_a_running_server_is_paused_flushed_and_continued(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    with LiveServer(tiny_model) as server:

        def output_of(*words: str) -> str:
            result = RUNNER.invoke(main.app, [*words, "--url", server.url])
            assert result.exit_code == 0, result.exception
            (line,) = result.stdout.splitlines()
            return line

        def state() -> Any:
            return server.client.get("/server_info").json()["internal_states"][0]

        body = {"text": "abc", "rid": "one", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        for abort in (["one"], ["--all"]):
            replies: list[Any] = []
            request = threading.Thread(
                target=lambda found=replies: found.append(server.client.post("/generate", json=body).json())
            )
            request.start()
            wait_until(lambda: state()["running_batch_size"] == 1)
            with pytest.raises(RemoteError, match=r"400 Cache not flushed\. Reason: 1 requests run"):
                RUNNER.invoke(main.app, ["flush", "--url", server.url], catch_exceptions=False)
            line = output_of("pause", "--mode", "in-place", "--ttl", "60")
            assert line.startswith(
                "paused (in_place): 1 requests in place, 0 waiting; 0 retracted, 0 aborted; "
            )
            line = output_of("pause")
            assert line.startswith(
                "paused (retract): 0 requests in place, 1 waiting; 1 retracted, 0 aborted; "
            )
            assert re.fullmatch(r"Cache flushed\. Flushed items: \d+", output_of("flush", "--timeout", "5"))
            assert output_of("continue") == "Generation continued successfully."
            assert not state()["engine_paused"]
            assert (
                output_of("abort", *abort)
                == f"asked the server to abort {'one' if abort == ['one'] else 'all requests'}"
            )
            request.join(60)
            assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"
        server.assert_nothing_left()


def test_control_commands_send_the_admin_key(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(tiny_model, api_key="a", admin_api_key="b") as server:

        def exit_code_of(*words: str) -> int:
            return RUNNER.invoke(main.app, ["continue", "--url", server.url, *words]).exit_code

        assert (exit_code_of(), exit_code_of("--api-key", "a"), exit_code_of("--api-key", "b")) == (1, 1, 0)
        monkeypatch.setenv("SEGUE_API_KEY", "a")
        assert exit_code_of() == 1
        monkeypatch.setenv("SEGUE_ADMIN_API_KEY", "b")
        assert (exit_code_of(), exit_code_of("--api-key", "c")) == (0, 1)
        assert exit_code_of("--api-key", "") == 0, "as when a script passes a variable that is not set"


def test_the_reason_of_a_refusal_is_shown(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server:
        for words, message in (
            (["pause", "--mode", "stop"], r"400 mode='stop': .*retract"),
            (["pause", "--ttl", "-1"], r"400 ttl_s=-1\.0: .*greater than 0"),
            (["flush", "--timeout", "inf"], r"400 timeout='inf'"),
        ):
            with pytest.raises(RemoteError, match=message):
                RUNNER.invoke(main.app, [*words, "--url", server.url], catch_exceptions=False)


@pytest.mark.parametrize("words", [[], ["x", "--all"]])
def test_abort_needs_either_an_id_or_all(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="either a request's id or --all"):
        RUNNER.invoke(main.app, ["abort", *words], catch_exceptions=False)


def test_models_lists_the_models_in_the_cache(tmp_path: Path) -> None:
    converted = tmp_path / "converted" / ("a" * 64) / convert.FORMAT
    converted.mkdir(parents=True)
    (converted / "config.json").write_text("{}")
    (converted / "model.bin").write_bytes(b"x" * 3 * 2**20)
    (tmp_path / "hashes").mkdir()
    for name, content in (("cut", '{"path": "/x'), ("empty", "{}"), ("list", "[]")):
        (tmp_path / "hashes" / f"{name}.json").write_text(content)
    result = RUNNER.invoke(main.app, ["models", "--cache-dir", str(tmp_path)], env={"COLUMNS": "300"})
    assert "SmolLM2-135M-Instruct" in result.output
    assert "fetched at first use" in result.output
    assert re.search(r"a{12} +converted +3 MiB", result.output)


def test_models_of_an_unreadable_cache_is_a_one_line_error() -> None:
    # The name is too long, so that even root cannot read the directory.
    result = run("models", "--cache-dir", "/tmp/" + "x" * 300)
    assert result.returncode == 1
    assert re.fullmatch(r"segue: the cache directory .* cannot be read .*--cache-dir\n", result.stderr)


def test_serve_with_the_real_engine(tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--port", "0", "--num-kv-tokens", "2048"]
    process = start_child(
        [sys.executable, "-m", "segue", "serve", *flags],
        env=os.environ | {"SEGUE_LOG_LEVEL": "warning"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        while not lines or "Ready" not in lines[-1]:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line)
        table = "".join(lines)
        assert "tiny-model (LlamaForCausalLM)" in table
        assert "512 tokens" in table
        assert "2048 tokens" in table
        match = re.search(r"http://[\d.:]+", lines[-1])
        assert match is not None
        body = {"model": "tiny-model", "prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{match[0]}/v1/completions", json=body, timeout=30).json()
        assert reply["usage"]["completion_tokens"] == 5
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert time.monotonic() - began < 20, "it waits for nothing"
    finally:
        process.kill()
        process.communicate()


def commands(
    group: typer.core.TyperGroup, path: str = "segue"
) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{path} {name}")
        elif isinstance(command, typer.core.TyperCommand):
            yield f"{path} {name}", command


def test_every_option_of_every_command_is_in_a_group_and_has_a_variable() -> None:
    group = typer.main.get_command(main.app)
    assert isinstance(group, typer.core.TyperGroup)
    found = [
        (path, option)
        for path, command in commands(group)
        for option in command.params
        if isinstance(option, typer.core.TyperOption)
    ]
    assert {path for path, _ in found} >= {
        "segue cluster",
        "segue trainer",
        "segue pause",
        "segue bench profile",
        "segue bench offline",
        "segue bench serving",
        "segue doctor",
    }
    assert [(path, option.name) for path, option in found if not option.rich_help_panel] == []
    without = [
        option.opts[0] for _, option in found if not (option.envvar or "SEGUE_" in (option.help or ""))
    ]
    assert without == ["--all"]  # no variable makes `segue abort` abort everything


@pytest.mark.parametrize(("command", "flag"), [("trainer", "--port"), ("generate", "--temperature")])
def test_an_option_of_one_command_can_be_set_by_its_variable(
    command: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SEGUE_{flag.strip('-').upper()}", "warm")
    result = RUNNER.invoke(main.app, [command, "Hello"][: 1 if command == "trainer" else 2])
    assert result.exit_code == 2 and f"'{flag}'" in result.output
