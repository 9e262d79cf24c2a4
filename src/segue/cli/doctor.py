"""``segue doctor``: whether ``segue serve`` could start here, what it would choose, and what is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from segue.cli.flags import join_lists, setting, with_options
from segue.cli.quiet import quiet
from segue.cli.reporting import errors_in_red
from segue.config import EngineConfig
from segue.doctor.checkup import check_up
from segue.doctor.findings import START, Checkup, Finding, Section

WIDTH = 120  # columns if the output is no terminal
_MARKS = {"ok": "[green]✓[/green]", "missing": "[yellow]-[/yellow]", "failed": "[red]✗[/red]"}


@with_options(EngineConfig)
def doctor(
    config: EngineConfig,
    as_json: Annotated[bool, setting("json", "Print JSON instead of tables.", group="Doctor")] = False,
) -> None:
    """Check this installation: versions, devices, ports, and what an engine would choose, with the reasons.

    It takes the options of `segue serve`, and no model is loaded. The exit code is 1 if `segue serve` could
    not start with them.
    """
    found = check_up(quiet(config))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=WIDTH)).print(report(found))
    if not found.can_serve:
        raise typer.Exit(1)


def report(found: Checkup) -> Group:
    """Return the check-up as tables, and under them whether an engine could start."""
    failures = [
        f"[red]segue serve cannot start: {escape(_sentence(each))}[/red]" for each in found.failures
    ] or ["[bold green]segue serve can start.[/bold green]"]
    return Group(*map(_table, found.sections), *failures)


def main(words: Sequence[str]) -> None:
    """Run the command alone, without what the other commands need: a package of theirs may be missing."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})(doctor)
    with errors_in_red():
        app(args=join_lists(words, EngineConfig), prog_name="segue doctor")


def _table(section: Section) -> Table:
    table = Table(box=None, title=section.title, title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in section.findings:
        lines = [escape(each.value)]
        if each.why:
            lines.append(f"[dim]{escape(each.why)}[/dim]")
        if each.remedy:
            lines.append(f"[yellow]{escape(each.remedy)}[/yellow]")
        table.add_row(_MARKS[each.status], f"[dim]{escape(each.name)}[/dim]", "\n".join(lines))
    return table


def _sentence(failure: Finding) -> str:
    """Return the reason and the remedy of a failure, in one line."""
    reason = failure.value if failure.name == START else f"{failure.name}: {failure.value}"
    if failure.why:
        reason += f" ({failure.why})"
    return f"{reason}; {failure.remedy}" if failure.remedy else reason
