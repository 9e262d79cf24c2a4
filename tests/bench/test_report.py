"""What results say of the machine that they were measured on."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from bench import report


def test_a_model_is_stored_by_its_name_without_the_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    place = f"{tempfile.gettempdir()}/tmp1/qwen3-8b"
    options = ["--model", place, f"--model={place}", "--load-format", "dummy", "/var" + place]
    found = json.loads(report.save("name", {"options": options}).read_text())
    expected = ["--model", "qwen3-8b", "--model=qwen3-8b", "--load-format", "dummy", "/var" + place]
    assert found["options"] == expected


def test_no_stored_result_has_a_temporary_folder() -> None:
    texts = {path.name: path.read_text() for path in report.RESULTS.glob("*.json")}
    assert texts and not [name for name, text in texts.items() if re.search(r'["=]/tmp/', text)]
