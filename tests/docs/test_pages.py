"""Every block of the README and the documentation that can run here is run, page by page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import surroundings
from tests.docs.blocks import COMMANDS, Block, blocks, pages
from tests.docs.session import PageSession, needs_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def runnable(page: Path) -> list[Block]:
    return [each for each in blocks(page) if each.language in (*COMMANDS, "python") and each.not_run is None]


@pytest.mark.parametrize("page", [page for page in pages() if runnable(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    session = PageSession(tmp_path)
    try:
        for block in runnable(page):
            prelude = ""
            if "run with" in block.marks:
                prelude = surroundings.make(session, block)
            elif needs_server(block) and not session.serves:
                surroundings.serve(session)
            session.run(block, prelude)
    finally:
        session.stop()
