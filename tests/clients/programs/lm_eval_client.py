"""lm-eval's `local-completions` against a server, and its own `hf` model, on tasks of a few lines.

    python lm_eval_client.py URL MODEL DIRECTORY SCRATCH

The server serves what is in DIRECTORY, as MODEL. Tasks and their data are written to SCRATCH.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

URL, MODEL, DIRECTORY, SCRATCH = sys.argv[1:5]
os.environ |= {"HF_HOME": f"{SCRATCH}/home", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from lm_eval import simple_evaluate  # noqa: E402 - reads the environment
from lm_eval.tasks import TaskManager  # noqa: E402

TOLERANCE = 1e-3
LINES = [
    ("The river ran past a small stone", [" house", " garden", " bridge over the water"], 0),
    ("She opened the window and looked", [" out", " away from here", " at"], 2),
    ("In the evening they walked", [" home", " slowly along the shore", " into town"], 1),
    ("One two three four", [" five", " six seven"], 0),
    ("A list of animals: dog, cat,", [" horse", " table and chair"], 0),
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "{{text}}"
"""
TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer",
    "words": 'output_type: loglikelihood\ndoc_to_target: "{{choices[answer]}}"\nmetric_list: [{metric: acc}]',
    "rolling": (
        'output_type: loglikelihood_rolling\ndoc_to_target: "{{text}}{{choices[0]}}"\n'
        "metric_list: [{metric: word_perplexity}]"
    ),
    "text": (
        'output_type: generate_until\ndoc_to_target: "{{choices[answer]}}"\n'
        'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false, temperature: 0.0}\n'
        "metric_list: [{metric: exact_match}]"
    ),
}


def write_tasks() -> TaskManager:
    scratch = Path(SCRATCH)
    data = scratch / "data.jsonl"
    rows = [{"text": t, "choices": c, "answer": a} for t, c, a in LINES]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, lines in TASKS.items():
        (scratch / f"{name}.yaml").write_text(f"task: segue_{name}\n{COMMON % data}\n{lines}\n")
    return TaskManager(include_path=SCRATCH, include_defaults=False)


def evaluate(manager: TaskManager, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[f"segue_{name}" for name in TASKS],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )
    return found


def replies(found: dict[str, Any], name: str) -> list[Any]:
    samples = sorted(found["samples"][f"segue_{name}"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(LINES)
    return [sample["filtered_resps"] for sample in samples]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= TOLERANCE
    return bool(ours == theirs)


def main() -> None:
    manager = write_tasks()
    theirs = evaluate(manager, "hf", {"pretrained": DIRECTORY, "dtype": "float32", "device": "cpu"})
    at = {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": DIRECTORY, "max_length": 512}
    for ways in ({"num_concurrent": 4}, {"batch_size": 4}):
        ours = evaluate(manager, "local-completions", at | ways)
        for name in TASKS:
            mine, expected = replies(ours, name), replies(theirs, name)
            assert same(mine, expected), (name, ways, mine, expected)
    spread = [pair[0] for each in replies(theirs, "choices") for pair in each]
    assert max(spread) - min(spread) > 1.0, "the model is too flat to tell anything"
    print("all done")


main()
