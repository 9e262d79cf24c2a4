"""What is loaded for which command, and completion in the shell, which needs all commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SEGUE = "import sys; sys.argv[0] = 'segue'; from segue.cli.entry import main; main()"


def segue(*words: str, **environment: str) -> str:
    """Returns what the installed program prints."""
    return subprocess.run(
        [sys.executable, "-c", SEGUE, *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_the_shell_completes_commands_and_flags(tmp_path: Path) -> None:
    # Where Typer asks no process which shell it is, the shell is named.
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "bash completion installed" in segue("--install-completion", "bash", **home)
    script = (tmp_path / ".bash_completions" / "segue.sh").read_text()
    assert (
        "_SEGUE_COMPLETE=complete_bash" in script
        and "complete -o default -F _segue_completion segue" in script
    )
    # A command for which not everything is loaded when it runs.
    found = segue(COMP_WORDS="segue serve --memory-r", COMP_CWORD="2", _SEGUE_COMPLETE="complete_bash")
    assert found.split() == ["--memory-ratio"]


def test_a_server_loads_no_other_command() -> None:
    program = (
        "import sys, segue.cli.entry as entry, segue.cli.serving as serving\n"
        "serving.main = lambda name, words: print(name, words, 'segue.cli.main' in sys.modules)\n"
        "sys.argv[1:] = ['serve', '--port', '0']\n"
        "entry.main()"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == (
        "serve ['--port', '0'] False\n"
    )
