"""What blocks of the documentation find already there when they run."""

from __future__ import annotations

MODEL = "SmolLM2-135M-Instruct"
NAMES = ("certificate", "prompts.jsonl", "segue.toml", "tool model", "trainer")
