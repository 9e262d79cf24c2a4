"""Each block of the README and the documentation is what its language and its marks say, and can be used."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from segue.cli.main import app
from segue.config import EngineConfig
from segue.router.app import create_router_app
from segue.router.config import RouterConfig
from segue.server.access import describe
from segue.server.app import create_app
from tests.docs import data, shell, surroundings
from tests.docs.blocks import (
    COMMANDS,
    DATA,
    LANGUAGES,
    PICTURES,
    REASONS,
    ROOT,
    Block,
    all_blocks,
    blocks,
    pages,
    prose,
)
from tests.docs.links import broken_links, links
from tests.server.live import LiveServer
from tests.support.tool_model import write_tool_model

BLOCKS = all_blocks()
SERVED_URL = "http://127.0.0.1:30000"
# At most so many blocks may be left out for each reason: a new one needs a reason that is as good as these.
MOST_LEFT_OUT = {"gpu": 3, "kubernetes": 2, "network": 4, "other-project": 6, "placeholder": 8}


# Options of other programs, and one that a first design had.
OPTIONS_OF_OTHERS = {
    *("--check-weight-update-equal", "--help", "--long-prefill-token-threshold", "--strict", "--time"),
    *("--worker-urls", "--no-page"),
}
# Routes of the training server, of the system port, and those that OpenAPI's description leaves out.
OTHER_ROUTES = {
    *("/add_inference_endpoint", "/remove_inference_endpoint", "/inference_endpoints", "/save_checkpoint"),
    *("/sync_inference_weights", "/sync_status", "/train_step"),
    *("/engine/hand_over", "/engine/wake_up", "/startup"),
    *("/", "/leg", "/page_events"),
}


@pytest.fixture(scope="module")
def routes() -> dict[str, Any]:
    """OpenAPI's description of an engine's routes and of a router's."""
    engine = describe("engine", create_app(EngineConfig()).routes)
    router = describe("router", create_router_app(RouterConfig()).routes)
    for kind in ("schemas", "responses"):
        engine["components"][kind] |= router["components"][kind]
    for path, operations in router["paths"].items():
        engine["paths"].setdefault(path, operations)
    return engine


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_block_has_a_language_and_known_marks(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r}; give one of {LANGUAGES}"
        if block.not_run is not None:
            assert block.not_run in REASONS, f"{block}: the reason must be one of {REASONS}"
            assert block.language in (*COMMANDS, "python"), f"{block}: such a block is not run anyway"
        if (needs := block.marks.get("run with")) is not None:
            assert needs in surroundings.SURROUNDINGS and block.not_run is None, f"{block}: {needs}"
        assert (block.language in DATA) == ("is" in block.marks), f"{block}: say what it is, if it is data"


def test_a_mark_stands_before_a_block() -> None:
    marks = [block.marks for block in BLOCKS]
    written = [
        line for page in pages() for _, line in prose(page) if re.match(r" *<!-- (not|run|is)\b", line)
    ]
    assert len(written) == sum(map(len, marks)), "some mark is misspelled, or no block follows it"


def test_few_blocks_are_left_out_and_each_for_a_known_reason() -> None:
    left_out = Counter(block.not_run for block in BLOCKS if block.not_run is not None)
    assert MOST_LEFT_OUT.keys() == set(REASONS)
    assert not left_out - Counter(MOST_LEFT_OUT), left_out


def test_no_command_hides_in_a_picture() -> None:
    programs = r"(\$ |(\.venv/bin/)?(segue|curl|make|pip|python3?|uv) [\w./-])"
    hidden = [
        str(block)
        for block in BLOCKS
        if block.language in PICTURES and re.search(rf"^{programs}", block.text, re.M)
    ]
    assert hidden == []


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language in COMMANDS], ids=str)
def test_each_command_is_one_that_its_program_takes(block: Block, routes: dict[str, Any]) -> None:
    shell.check_syntax(block.script)
    commands = shell.simple_commands(block.script)
    assert commands, "the block has no command"
    for words in commands:
        shell.check(words, routes)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language in DATA], ids=str)
def test_data_are_what_they_are_said_to_be(block: Block, routes: dict[str, Any], tmp_path: Path) -> None:
    data.check(block, routes, tmp_path)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "python"], ids=str)
def test_programs_compile_and_what_they_import_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text, str(block))):
        if isinstance(node, ast.ImportFrom) and block.not_run != "other-project":
            module = importlib.import_module(node.module or "")
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("segue serve --shadow-mod", "--shadow-mod"),
        ("segue serve --port 70000", "65535"),
        ("segue serve --role prefil", "prefil"),
        ("make demos", "demos"),
        ("python -m bench.offline --no-such-option 3", "--no-such-option"),
        ("python -m bench.none", "does not exist"),
        ("pip install 'segue[fa4]'", "fa4"),
        ("curl http://127.0.0.1:30000/generates", "no route GET /generates"),
        ("curl http://h:1/generate -H 'Content-Type: application/json' -d '{\"text\": {}}'", "is not valid"),
        ('curl http://h:1/generate -d \'{"text": "a"}\'', "not declared as JSON"),
        ("seguee serve", "no program"),
        ("segue serve 'a", "quote|matching"),
    ],
)
def test_a_wrong_command_is_found(script: str, why: str, routes: dict[str, Any]) -> None:
    with pytest.raises(shell.WrongCommandError, match=why):
        shell.check_syntax(script)
        for words in shell.simple_commands(script):
            shell.check(words, routes)


def test_a_terminal_shows_commands_and_what_they_print() -> None:
    text = "$ curl -d '{\n  \"a\": 1}' \\\n  url\nReady\n$ segue top\n"
    block = Block(ROOT / "README.md", 1, "console", text, {})
    assert shell.simple_commands(block.script) == [["curl", "-d", '{\n  "a": 1}', "url"], ["segue", "top"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One engine, of a tiny model whose template knows tools, for all requests of the documentation."""
    model = write_tool_model(tmp_path_factory.mktemp("docs") / "tools")
    config = json.loads((model / "config.json").read_text())
    # The documentation has token ids of the bundled model.
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    sizes = {"num_kv_tokens": 8192, "max_running_requests": 4, "chunked_prefill_size": 64}
    with LiveServer(model, real=True, served_model_name=surroundings.MODEL, **sizes) as server:
        yield server


def to_the_server(block: Block) -> list[shell.Request]:
    """The requests of a block that a single server answers."""
    if block.language not in COMMANDS or block.not_run is not None or SERVED_URL not in block.text:
        return []
    requests = [
        shell.request_of(words) for words in shell.simple_commands(block.script) if words[0] == "curl"
    ]
    return [each for each in requests if each.url.startswith(SERVED_URL)]


@pytest.mark.parametrize("block", [each for each in BLOCKS if to_the_server(each)], ids=str)
def test_each_request_is_answered(block: Block, server: LiveServer) -> None:
    for request in to_the_server(block):
        url = server.url + request.url.removeprefix(SERVED_URL)
        reply = server.client.request(request.method, url, headers=request.headers, content=request.body)
        assert reply.status_code == 200, f"{block}: {reply.status_code} {reply.text}"


def test_the_readme_shows_the_example_that_it_runs() -> None:
    shown = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert (ROOT / "examples" / "ten_lines.py").read_text() in shown
    assert len(shown[0].splitlines()) == 10


@pytest.fixture(scope="module")
def known_options() -> set[str]:
    """Every option of Segue's commands, and every word in this repository's programs that looks like one."""
    command: Any = typer.main.get_command(app)
    found: set[str] = set()
    commands = [command]
    while commands:
        command = commands.pop()
        commands.extend(getattr(command, "commands", {}).values())
        found.update(option for parameter in command.params for option in parameter.opts)
    for folder in ("bench", "examples", "scripts", "tests/attack", "tests/clients"):
        for program in (ROOT / folder).glob("*.py"):
            text = program.read_text()
            found.update(re.findall(r"--[a-z][a-z0-9-]+", text))
            found.update(f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): ", text, re.M))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_option_that_a_page_names_exists(page: Path, known_options: set[str]) -> None:
    for number, line in prose(page):
        for code in re.findall(r"`([^`]+)`", line):
            options = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-]*…)", code)
            unknown = set(options) - known_options - OPTIONS_OF_OTHERS
            assert not unknown, f"{page.name}:{number}: {unknown}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_route_that_a_page_names_exists(page: Path, routes: dict[str, Any]) -> None:
    for number, line in prose(page):
        if "no such route" in line:
            continue
        for method, path in re.findall(r"`(GET|POST|DELETE) (/[^`?\s]+)", line):
            if path not in OTHER_ROUTES:
                try:
                    shell.operation_of(method, path, routes)
                except shell.WrongCommandError as error:
                    raise AssertionError(f"{page.name}:{number}: {error}") from None


def test_the_page_of_the_api_names_every_route(routes: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "http-api.md").read_text()
    named = set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", text))
    described = {(method.upper(), path) for path, each in routes["paths"].items() for method in each}
    assert described - named == set(), "add them to docs/http-api.md"


def test_every_page_is_in_the_navigation() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    groups = yaml.safe_load(text)["nav"]
    named = [
        page for group in groups for pages in group.values() for entry in pages for page in entry.values()
    ]
    own = {"index.md", "changelog.md", "contributing.md"}
    assert len(named) == len(set(named))
    assert set(named) == own | {
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    }


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    assert sum(1 for page in pages() for _ in links(page)) > 200
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Ending\n")
    text = "# A & B\n## Same\n## Same\n[a](other.md#ending) [b](other.md#end)\n[c](none.md) [d](#a--b) "
    page.write_text(text + "[e](#same-1)\n```text\n[f](nowhere)\n```\n`[g](nowhere)`\n[h](../..)\n")
    broken = [each.split(": ")[1] for each in broken_links(page, tmp_path)]
    assert broken == ["other.md#end", "none.md", "../.."]
