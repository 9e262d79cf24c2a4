"""What processes that start others need."""

from __future__ import annotations

import pytest

from segue.children import describe_exit


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL, perhaps"), (-11, "SIGSEGV")]
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)
