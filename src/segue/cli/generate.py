"""``segue generate``: continues one text, or answers the prompts of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from segue.cli.asking import MaxTokens, Temperature, TopP, given, opened
from segue.cli.backends import LocalModel, RemoteModel, TextQuery
from segue.cli.batch import BatchRun, RunStoppedError, Totals
from segue.cli.flags import setting, with_options
from segue.cli.prompt_file import InputFormat, PromptFile
from segue.cli.remote import ClientKey, ServerUrl
from segue.cli.result_file import ResultFile
from segue.cli.sampling import check_sampling
from segue.config import SERVER_GROUPS, EngineConfig
from segue.errors import ConfigError, SegueError

FILES = "Files"
SOME_FAILED = 3  # the exit code if some prompts have an error


@with_options(EngineConfig, without=SERVER_GROUPS)
def generate(
    config: EngineConfig,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    input_: Annotated[
        str | None,
        setting(
            "input",
            "File of prompts: a line of text each, or in *.jsonl an object each with prompt or messages, and "
            "perhaps id and sampling fields; '-': the standard input.",
            group=FILES,
        ),
    ] = None,
    input_format: Annotated[
        InputFormat, setting("input_format", "What --input has; 'auto': as its name says.", group=FILES)
    ] = "auto",
    output: Annotated[
        str,
        setting(
            "output",
            "File for the answers, a JSON object each, in the order in which they are done. If it has some "
            "already, only the others are made. '-': the standard output.",
            group=FILES,
        ),
    ] = "-",
    overwrite: Annotated[
        bool, setting("overwrite", "Drop what --output has, and begin anew.", group=FILES)
    ] = False,
    parallel: Annotated[
        int, setting("parallel", "Most prompts that are in flight at once.", group=FILES, min=1, max=1024)
    ] = 32,
    patience_s: Annotated[
        float,
        setting(
            "patience_s",
            "Seconds that a server may be away, or without room, before the run ends.",
            group=FILES,
            min=0,
        ),
    ] = 60.0,
    url: ServerUrl = None,
    api_key: ClientKey = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
) -> None:
    """Continue a text, and print the continuation while it is generated; or answer a file of prompts.

    The exit code is 0 if every prompt has its answer, 3 if some have an error, which the output names and a
    further run tries again, and 1 if the run could not go on.
    """
    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    check_sampling(sampling)
    if (prompt is None) == (input_ is None):
        raise ConfigError("give either a text to continue or --input FILE", param="input")
    if input_ is None:
        if output != "-" or overwrite:
            raise ConfigError("--output and --overwrite go with --input FILE; use the shell's > for one text")
        with opened(config, url, api_key) as model:
            for piece in model.stream(TextQuery(prompt=prompt, sampling=sampling)):
                typer.echo(piece, nl=False)
            typer.echo()
        return
    prompts, results = PromptFile(input_, input_format, sampling), ResultFile(output, overwrite=overwrite)
    try:
        count = results.check(prompts.digests())
        if count == len(results.done):
            Console(stderr=True, highlight=False).print(f"all {count} answers are there already")
            return
        with opened(config, url, api_key) as model:
            totals = _answer_all(model, prompts, results, count, parallel, patience_s)
    finally:
        results.close()
    if totals.num_errors:
        raise typer.Exit(SOME_FAILED)


def _answer_all(
    model: LocalModel | RemoteModel,
    prompts: PromptFile,
    results: ResultFile,
    count: int,
    parallel: int,
    patience_s: float,
) -> Totals:
    """Answer the prompts that have no answer yet.

    Raises:
        ConfigError: the output cannot be written.
        RunStoppedError: the engine has died, or the server is away for too long.
    """
    run = BatchRun(model, parallel=min(parallel, count), patience_s=patience_s)
    missing = (line for line in prompts.prompts() if line.index not in results.done)
    with _progress(count, len(results.done)) as show:
        try:
            for outcome in run.outcomes(missing, lambda: show(run.totals)):
                results.write(outcome)
                show(run.totals)
        except ConfigError:
            raise
        except (SegueError, KeyboardInterrupt) as error:
            made = run.totals.num_answers + len(results.done)
            left = f"{made} of {count} answers are made; run the same command again to continue"
            if isinstance(error, SegueError):
                raise RunStoppedError(f"{error.message} — {left}") from None
            Console(stderr=True, highlight=False).print(f"\nstopped: {left}", soft_wrap=True)
            raise
    return run.totals


@contextmanager
def _progress(count: int, num_done: int) -> Iterator[Callable[[Totals], None]]:
    """Return a function that moves the bar of a terminal; at the end, one line says what was done."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.fields[words]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count, completed=num_done, words="")
        last = Totals()

        def show(totals: Totals) -> None:
            nonlocal last
            last = totals
            words = f"{totals.num_tokens / max(bar.tasks[0].elapsed or 0, 1e-3):.0f} tokens/s"
            if totals.num_errors:
                words += f", {totals.num_errors} errors"
            bar.update(task, completed=num_done + totals.num_answers + totals.num_errors, words=words)

        yield show
        seconds = bar.tasks[0].elapsed or 0.0
    answers = f"{last.num_answers} answers" + (f" and {num_done} from before" if num_done else "")
    speed = (
        f"{last.num_tokens} tokens in {seconds:.1f} s, {last.num_tokens / max(seconds, 1e-3):.0f} tokens/s"
    )
    console.print(f"{answers}, {last.num_errors} errors; {speed}", soft_wrap=True)
