"""What is refused of a grammar before any token is known, and what is not."""

from __future__ import annotations

import pytest

from segue.guided.grammars import GrammarError, check
from segue.messages.guided import GrammarSpec


def test_a_schema_may_be_true_and_nothing_fits_false() -> None:
    check(GrammarSpec("json_schema", " true\n"))
    with pytest.raises(GrammarError, match="no JSON fits the schema false; give"):
        check(GrammarSpec("json_schema", "false"))
