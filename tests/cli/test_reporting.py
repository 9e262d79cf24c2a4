"""How a command ends that cannot do what it was asked."""

from __future__ import annotations

import json

import pytest

from segue.cli.reporting import errors_in_red
from segue.errors import ConfigError
from segue.logs import LogFormat, configure


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_error_is_one_line_of_the_form_of_the_log(
    form: LogFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("info", form)
    with pytest.raises(SystemExit) as ended, errors_in_red():
        raise ConfigError("port 1 is in use")
    configure("info")
    assert ended.value.code == 1
    (line,) = capfd.readouterr().err.splitlines()
    if form == "json":
        found = json.loads(line)
        assert (found["level"], found["message"]) == ("critical", "port 1 is in use")
    else:
        assert line == "segue: port 1 is in use"
