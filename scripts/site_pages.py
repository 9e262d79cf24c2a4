"""A hook of mkdocs: pages of the repository's root and files of `bench/results` become part of the site.

Links are written for the repository. On the site, README.md, CONTRIBUTING.md and CHANGELOG.md are pages
beside those of `docs/`, and the charts that pages show are copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
DOCS, RESULTS = "docs/", "bench/results/"
FENCE = re.compile(r"^( *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)(?=[)#])")
MARK = re.compile(r"^ *<!-- (not run|run with|is): .* -->\n", re.MULTILINE)  # for the tests of the blocks


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, and all results that a page links to."""
    for source, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in [file for file in files if file.is_documentation_page()]:
        for target in (target for _, target in _links(page.content_string, page.src_uri)):
            if target.startswith(RESULTS) and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page into those of the site, and leave out the marks for the tests.

    Raises:
        PluginError: a link leads to a file of the repository that is no part of the site.
    """
    parts = FENCE.split(MARK.sub("", markdown))
    place = page.file.src_uri
    for index in range(0, len(parts), 2):  # each second part is a block
        parts[index] = LINK.sub(lambda link: _on_site(_target(link[1], place), link[1], place), parts[index])
    return "".join(parts)


def _links(markdown: str, place: str) -> list[tuple[str, str]]:
    text = "".join(FENCE.split(markdown)[::2])
    return [(link, _target(link, place)) for link in LINK.findall(text)]


def _target(link: str, place: str) -> str:
    """The file of the repository that a link of the page at ``place`` leads to."""
    folder = "" if place in ROOT_PAGES.values() else DOCS
    return posixpath.normpath(posixpath.join(folder, link))


def _on_site(target: str, link: str, place: str) -> str:
    """The same file on the site, whose pages all are in one folder."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if target == f"{DOCS}grafana.json" or target.startswith(RESULTS):
        return target.removeprefix(DOCS)
    if not target.startswith(DOCS):
        raise PluginError(f"{place}: {link} is no part of the site; name the file as code, or link to a page")
    return target.removeprefix(DOCS)
