"""Commands of the documentation are read as a shell reads them, and checked without being run."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
import typer.main

from segue.cli.config_file import CONFIG_FLAG
from segue.cli.flags import join_lists
from segue.cli.main import app
from segue.cluster.config import ClusterConfig
from segue.config import EngineConfig
from segue.router.config import RouterConfig
from tests.docs.blocks import ROOT

OPTIONS = {"serve": EngineConfig, "router": RouterConfig, "cluster": ClusterConfig}
OTHER_PROGRAMS = {"cat", "cd", "docker", "export", "git", "kubectl", "tee", "wait"}
ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
HERE = re.compile(r"<<'?(\w+)'?")
OPERATORS = {"|", "||", "&", "&&", ";"}


class WrongCommandError(ValueError):
    """A command that a reader could not use as it stands."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a curl command sends; ``body`` is text, and None where it sends none."""

    method: str
    url: str
    headers: dict[str, str]
    body: str | None

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


def check_syntax(script: str) -> None:
    """Raises `WrongCommandError` if a shell does not understand the script."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise WrongCommandError(done.stderr)


def statements(script: str) -> list[str]:
    """The statements of a script, each with all of its lines: of a quotation, and of a text of `<<`."""
    found: list[str] = []
    part, end_of_text = "", ""
    for line in script.splitlines(keepends=True):
        part += line
        if end_of_text:
            if line.strip() != end_of_text:
                continue
            end_of_text = ""
        elif (here := HERE.search(part)) is not None:
            end_of_text = here[1]
            continue
        elif part.endswith("\\\n") or _is_open(part):
            continue
        if part.strip():
            found.append(part)
        part = ""
    return [*found, part] if part else found


def words_of(statement: str) -> list[list[str]]:
    """The words of each simple command of a statement, without assignments before it and redirections."""
    if HERE.search(statement):
        statement = statement.splitlines()[0]
    reader = shlex.shlex(statement.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>")
    reader.whitespace_split = True
    commands: list[list[str]] = [[]]
    words = iter(reader)
    for word in words:
        if word in OPERATORS:
            commands.append([])
        elif word.startswith(("<", ">")):
            next(words)
        else:
            commands[-1].append(word)
    return [words for command in commands if (words := _without_assignments(command))]


def simple_commands(script: str) -> list[list[str]]:
    """The words of each simple command of a script."""
    return [words for statement in statements(script) for words in words_of(statement)]


def check(words: list[str], routes: dict[str, Any]) -> None:
    """Check one command; ``routes`` is OpenAPI's description of the server.

    Raises:
        WrongCommandError: it names something that does not exist, or has an option that its program has not.
    """
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    checks: dict[str, Callable[[list[str]], None]] = {
        "segue": _segue,
        "make": _make,
        "python": _python,
        "python3": _python,
        "pip": _pip,
        "uv": _pip,
        "curl": partial(_curl, routes=routes),
    }
    if program in checks:
        checks[program](rest)
    elif program.startswith("scripts/"):
        _exists(program)
    elif program not in OTHER_PROGRAMS:
        raise WrongCommandError(f"{program} is no program that the documentation uses; see {__name__}")


def request_of(words: list[str]) -> Request:
    """What a curl command sends.

    Raises:
        WrongCommandError: it has an option that the documentation does not use.
    """
    method, url, headers, body = None, "", {}, None
    rest = iter(words[1:])
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word in ("-d", "--json"):
            body = next(rest)
            if word == "--json":
                headers["Content-Type"] = "application/json"
        elif word in ("-o",):
            next(rest)
        elif word in ("-s", "-N", "-sN", "-f", "-sf", "-i"):
            continue
        elif word.startswith("-"):
            raise WrongCommandError(f"curl {word} is used nowhere else; see {__name__}")
        else:
            url = word
    return Request(method or ("GET" if body is None else "POST"), url, headers, body)


def validate(schema: dict[str, Any], value: Any, description: dict[str, Any]) -> None:
    """Check a value against a schema of OpenAPI's description, which has the schemas that it refers to."""
    import jsonschema

    try:
        jsonschema.validate(value, {**schema, "components": description["components"]})
    except jsonschema.ValidationError as error:
        raise WrongCommandError(error.message) from None


def operation_of(method: str, path: str, description: dict[str, Any]) -> dict[str, Any]:
    """The description of one route.

    Raises:
        WrongCommandError: there is no such route.
    """
    for template, operations in description["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path) and method.lower() in operations:
            found: dict[str, Any] = operations[method.lower()]
            return found
    raise WrongCommandError(f"there is no route {method} {path}")


def _without_assignments(words: list[str]) -> list[str]:
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    return words


def _is_open(statement: str) -> bool:
    """Whether a quotation has not ended yet."""
    try:
        shlex.split(statement, comments=True)
    except ValueError:
        return True
    return False


def _segue(words: list[str]) -> None:
    """Parse the words as Segue does, and check the rules between its options."""
    from typer._click.exceptions import ClickException

    from segue.errors import SegueError

    words = join_lists([word for word in words if word != "…"], EngineConfig, RouterConfig)
    if "--config" in words:  # its file is a block of its own
        file = words.index("--config")
        words = words[:file] + words[file + 2 :]
    command: Any = typer.main.get_command(app)
    try:
        context = command.make_context("segue", list(words))
        while hasattr(command, "resolve_command"):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            context = command.make_context(name, rest, parent=context)
        options = OPTIONS.get(words[0])
        if options is not None:
            given = {name: value for name, value in context.params.items() if value is not None}
            given.pop(CONFIG_FLAG, None)
            if words[0] == "serve":
                given.pop("shadows", None)
            options.create({}, **given)
    except typer.Exit:
        return
    except (ClickException, SegueError) as error:
        raise WrongCommandError(f"segue {shlex.join(words)}: {error}") from None


@cache
def _make_names() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*)(?=:)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def _make_variables() -> set[str]:
    return set(re.findall(r"\$\(([A-Z_]+)\)", (ROOT / "Makefile").read_text()))


def _make(words: list[str]) -> None:
    for word in words:
        known = _make_variables() if "=" in word else _make_names()
        if word.partition("=")[0] not in known:
            raise WrongCommandError(f"make {word}: the Makefile has no such target or variable")


def _exists(path: str) -> Path:
    if not (ROOT / path).exists():
        raise WrongCommandError(f"{path} does not exist")
    return ROOT / path


def _python(words: list[str]) -> None:
    if words[0] == "-c":
        ast.parse(words[1])
    elif words[:2] == ["-m", "pytest"]:
        for word in words[2:]:
            if word.startswith("tests/"):
                _exists(word.partition("::")[0])
    elif words[0] == "-m":
        path = words[1].replace(".", "/")
        if words[1].startswith(("bench", "examples", "scripts", "tests")):
            _takes(_exists(f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__main__.py"), words)
    else:
        _takes(_exists(words[0]), words)


def _takes(program: Path, words: list[str]) -> None:
    """Check that a program of this repository has the options, by its text or that of what it imports."""
    text = program.read_text()
    for module in re.findall(r"^from ((?:bench|examples|segue)[\w.]*) import", text, re.MULTILINE):
        path = ROOT / ("src" if module.startswith("segue") else "") / f"{module.replace('.', '/')}.py"
        text += path.read_text() if path.exists() else ""
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(each in text for each in _spellings(name)):
            raise WrongCommandError(f"{program.relative_to(ROOT)} has no option {name}")


def _spellings(flag: str) -> tuple[str, ...]:
    name = flag.removeprefix("--")
    return f'"{flag}"', f"{name.replace('-', '_')}:", f'"{name.replace("-", "_")}"'


def _pip(words: list[str]) -> None:
    """The extras that are installed are those of this package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for name in re.findall(r"^(?:segue|\.)\[([\w,-]+)\]$", word):
            if missing := set(name.split(",")) - set(extras):
                raise WrongCommandError(f"{word}: there is no extra {missing}")


def _curl(words: list[str], *, routes: dict[str, Any]) -> None:
    request = request_of(["curl", *words])
    operation = operation_of(request.method, request.path, routes)
    if request.body is None or request.body.startswith("@"):
        return
    if request.headers.get("Content-Type") != "application/json":
        raise WrongCommandError(f"curl {request.url}: the body is not declared as JSON")
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    validate(schema, json.loads(request.body), routes)
