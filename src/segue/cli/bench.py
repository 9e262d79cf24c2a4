"""``segue bench``: how fast an engine is by itself, how fast a server answers, where a step's time goes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from segue.cli.flags import setting, with_options
from segue.cli.quiet import quiet
from segue.config import SERVER_GROUPS, EngineConfig
from segue.errors import ConfigError
from segue.launch.processes import worker_environment

if TYPE_CHECKING:
    from segue.bench.load import Lengths
    from segue.bench.profile import StepProfile

bench_app = typer.Typer(help="Measure an engine or a server.", no_args_is_help=True)

T = TypeVar("T")
LOAD, LIMITS, OUTPUT = "Load", "Limits", "Output"
WIDTH = 150  # columns of a table if the output is no terminal
POLL_S = 0.2  # between two movements of a progress bar

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="File for the figures, with the machine and the versions. [dim]SEGUE_JSON_FILE[/dim]",
        envvar="SEGUE_JSON_FILE",
        show_envvar=False,
        rich_help_panel=OUTPUT,
    ),
]
InputTokens = Annotated[
    str, setting("input_tokens", "Tokens per prompt: a number, or MIN-MAX, drawn evenly.", group=LOAD)
]
OutputTokens = Annotated[
    str, setting("output_tokens", "Tokens per answer, in the same form; EOS does not end it.", group=LOAD)
]
MaxId = Annotated[
    int,
    setting("max_id", "Largest token id of a prompt; at most that of the vocabulary.", group=LOAD, min=1),
]


@bench_app.command("offline")
@with_options(EngineConfig, without=SERVER_GROUPS)
def offline(
    config: EngineConfig,
    requests: Annotated[int, setting("requests", "Requests per batch.", group=LOAD, min=1)] = 32,
    input_tokens: InputTokens = "128",
    output_tokens: OutputTokens = "128",
    repeats: Annotated[
        int, setting("repeats", "Batches, each of new prompts; the figures are medians.", group=LOAD, min=1)
    ] = 3,
    temperature: Annotated[
        float, setting("temperature", "0 always takes the likeliest token.", group=LOAD, min=0)
    ] = 0.0,
    max_id: MaxId = 10_000,
    json_file: JsonFile = None,
) -> None:
    """Measure an engine without a server: tokens per second of a batch of random prompts, all at once."""
    lengths = _lengths(input_tokens, output_tokens, max_id)
    from segue.api.engine import Engine
    from segue.bench import offline as bench
    from segue.bench.circumstances import save

    config = quiet(config)
    with Console(stderr=True).status(f"Loading {config.model or 'the bundled model'} …"):
        engine = Engine(**asdict(config))
    with engine, _progress() as progress:
        lengths = replace(lengths, max_id=min(max_id, bench.vocab_size(engine) - 1))
        bench.warm_up(engine, lengths)
        runs = []
        for number in range(repeats):
            batch = bench.Batch.draw(requests, lengths, temperature=temperature, seed=number)
            task = progress.add_task(f"batch {number + 1} of {repeats}", total=sum(batch.max_tokens))
            runs.append(bench.measure(engine, batch, partial(_advance, progress, task)))
        found = {"model": engine.model_name, **bench.summary(runs)}
    rows = [
        [str(number), *(f"{run.rates()[name]:,.1f}" for name in run.rates()), f"{run.seconds:.2f}"]
        for number, run in enumerate(runs, 1)
    ]
    names = list(runs[0].rates())
    rows.append(["median", *(f"{found[name]:,.1f}" for name in names), ""])
    tokens = f"{runs[0].prompt_tokens:,} prompt and {runs[0].output_tokens:,} output tokens"
    _show(f"{found['model']}: {requests} requests, {tokens}", ["batch", *names, "seconds"], rows)
    if json_file is not None:
        arguments = {
            "requests": requests,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "temperature": temperature,
            "max_id": lengths.max_id,
        }
        save(json_file, {"arguments": arguments, **found})


@bench_app.command("serving")
def serving(
    url: Annotated[str, typer.Argument(help="The server, as for OpenAI's clients: http://host:port/v1.")],
    rate: Annotated[
        list[float] | None,
        setting(
            "rate", "Requests per second; give it several times for several loads.", group=LOAD, min=0.001
        ),
    ] = None,
    seconds: Annotated[
        float, setting("seconds", "Seconds of arrivals, for each rate.", group=LOAD, min=0.1)
    ] = 20.0,
    input_tokens: InputTokens = "100-1024",
    output_tokens: OutputTokens = "64-512",
    burstiness: Annotated[
        float,
        setting("burstiness", "1: arrivals of a Poisson process; less: in bursts.", group=LOAD, min=0.01),
    ] = 1.0,
    max_id: MaxId = 10_000,
    text: Annotated[
        bool,
        setting("text", "Send texts of so many numbers, for servers that take no token ids.", group=LOAD),
    ] = False,
    chat: Annotated[
        bool, setting("chat", "Send chats, for servers without text completions; implies --text.", group=LOAD)
    ] = False,
    may_stop: Annotated[
        bool,
        setting(
            "may_stop",
            "Let answers end before --output-tokens, for servers that do not know ignore_eos.",
            group=LOAD,
        ),
    ] = False,
    model: Annotated[
        str | None, setting("model", "Model to ask for; default: the first that is listed.", group=LOAD)
    ] = None,
    api_key: Annotated[str | None, setting("api_key", "Key of the server.", group=LOAD)] = None,
    processes: Annotated[int, setting("processes", "Processes that send requests.", group=LOAD, min=1)] = 2,
    seed: Annotated[int, setting("seed", "Seed of arrivals and prompts.", group=LOAD)] = 0,
    slo_ttft: Annotated[
        float, setting("slo_ttft", "Seconds to the first token of a good request.", group=LIMITS, min=0)
    ] = 0.2,
    slo_gap: Annotated[
        float,
        setting("slo_gap", "Seconds between its tokens, in 99 of 100 gaps.", group=LIMITS, min=0),
    ] = 0.05,
    json_file: JsonFile = None,
) -> None:
    """Measure a server that speaks OpenAI's API: the time to the first token, and between tokens, under load.

    Requests come when they are due, whether or not others are answered, so a server that stalls cannot slow
    them down. Each answer has exactly as many tokens as were asked for. The exit code is 1 if a request
    fails.
    """
    lengths = replace(_lengths(input_tokens, output_tokens, max_id), text=text or chat)
    from segue.bench import serving as bench
    from segue.bench.circumstances import save
    from segue.bench.client import base_url
    from segue.bench.load import LEAD_S, SLO, Clients

    try:
        server = base_url(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rates = rate or [1.0]
    name = model or bench.model_of(server, api_key)
    slo, runs = SLO(ttft=slo_ttft, gap=slo_gap), []
    with Clients(server, name, processes, key=api_key, chat=chat, exact=not may_stop) as clients:
        for each in rates:
            runs.append(
                _watched(
                    f"{each:g} requests/s",
                    LEAD_S + seconds,
                    lambda each=each: bench.at_rate(  # type: ignore[misc]
                        clients,
                        each,
                        seconds=seconds,
                        lengths=lengths,
                        burstiness=burstiness,
                        slo=slo,
                        seed=seed,
                    ),
                )
            )
    _show(f"{name}, {bench.TITLE}", bench.COLUMNS, [bench.row("", run) for run in runs])
    failures = sorted({failure for run in runs for failure in run["errors"]})
    for failure in failures:
        Console(stderr=True, highlight=False).print(f"a request failed: {failure}", style="red", markup=False)
    if json_file is not None:
        arguments = {
            "url": server,
            "seconds": seconds,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "burstiness": burstiness,
            "chat": chat,
            "text": lengths.text,
            "may_stop": may_stop,
            "seed": seed,
        }
        save(json_file, {"arguments": arguments, "model": name, "rates": runs})
    if failures:
        raise typer.Exit(1)


@bench_app.command("profile")
@with_options(EngineConfig, without=SERVER_GROUPS)
def profile_steps(
    config: EngineConfig,
    steps: Annotated[
        list[str] | None,
        typer.Argument(help="Decode rows (32), the tokens of a prompt (p512), or both (255+p256)."),
    ] = None,
    context: Annotated[int, setting("context", "Tokens per decode row.", group="Profile", min=64)] = 512,
    kernels: Annotated[int, setting("kernels", "Kernels shown per step.", group="Profile", min=1)] = 12,
) -> None:
    """Profile steps: each kernel's share of the time, beside the roofline of the hardware."""
    os.environ.update(worker_environment(config.tp))  # as in a worker, before torch reads the environment
    from segue.bench.profile import StepBench

    config = quiet(config)
    shapes = [_parse_step(text) for text in steps or ["1", "16", "p512"]]
    console = Console(highlight=False)
    with console.status("Starting …"):
        bench = StepBench(config)
    with closing(bench):
        for rows, prompt in shapes:
            found = bench.decode(rows, context, prompt) if rows else bench.prefill(prompt)
            console.print(_kernel_table(found, kernels))


def _parse_step(text: str) -> tuple[int, int]:
    """Return the decode rows of a step, and the tokens of its prompt; 0 for the one that it lacks.

    A row is a request that decodes one token.
    """
    # The "+" is only between a first number and a prompt: `(?(1)…)` asks whether there is that number.
    found = re.fullmatch(r"([1-9]\d*)?(?:(?(1)\+)p([1-9]\d*))?", text)
    if found is None or not text:
        raise ConfigError(
            f"step {text!r}: give a number of decode rows (32), of prompt tokens (p512), or both (255+p256)"
        )
    return int(found[1] or 0), int(found[2] or 0)


def _kernel_table(found: StepProfile, num_kernels: int) -> Table:
    """Return the table of a profiled step: its first ``num_kernels`` kernels and their shares of the time."""
    times = f"{found.milliseconds:.3f} ms, {found.host_milliseconds:.3f} ms on the host"
    roofline = f"roofline {found.roofline_milliseconds:.3f} ms"
    table = Table(title=f"{found.label}: {times}; {roofline}", title_justify="left")
    for column in ("kernel", "calls", "µs", "share"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    total = sum(kernel.microseconds for kernel in found.kernels) or 1.0
    for kernel in found.kernels[:num_kernels]:
        share = f"{kernel.microseconds / total:.0%}"
        table.add_row(escape(kernel.name[:90]), f"{kernel.calls:g}", f"{kernel.microseconds:.1f}", share)
    return table


def _lengths(input_tokens: str, output_tokens: str, max_id: int) -> Lengths:
    """Return the lengths that the options ask for."""
    from segue.bench.load import Lengths

    return Lengths(
        prompt=_span(input_tokens, "input_tokens"),
        output=_span(output_tokens, "output_tokens"),
        max_id=max_id,
    )


def _span(text: str, name: str) -> tuple[int, int]:
    """Return the least and the most of a text like "128" or "100-1024"."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ConfigError(
            f"{name}={text!r}: give a number of tokens from 1 on, like 128, or MIN-MAX, like 100-1024",
            param=name,
        )
    return int(found[1]), int(found[2] or found[1])


def _progress() -> Progress:
    """Return progress bars on standard error, which a terminal alone shows."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _advance(progress: Progress, task: TaskID, completed: int) -> None:
    """Move a progress bar."""
    progress.update(task, completed=completed)


def _watched(name: str, seconds: float, work: Callable[[], T]) -> T:
    """Do work that takes about so many seconds, and show meanwhile how many of them have passed."""
    with _progress() as progress, ThreadPoolExecutor(1, "segue-bench") as pool:
        task, begun = progress.add_task(name, total=seconds), time.monotonic()
        working = pool.submit(work)
        while not working.done():
            progress.update(task, completed=min(seconds, time.monotonic() - begun))
            time.sleep(POLL_S)
        return working.result()


def _show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first are right-aligned."""
    table = Table(title=escape(title), title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(table)
