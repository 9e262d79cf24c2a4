"""Measures guided output: is it valid, how long do grammars take, and what does a step pay for it?

    python -m bench.guided                              # on a CPU, with the bundled model
    python -m bench.guided --device=cuda --model=0.6b   # only steps, of 64 rows; dummy weights

With the bundled model, 200 random JSON schemas, whose strings and arrays are bounded, are answered, 16 at a
time; each reply is validated by jsonschema. Grammars are checked and compiled as the engine does it,
and masks are computed along the replies, one row at a time. A timed step has 16 rows and no prompt: unguided,
or guided by a schema whose replies do not end. Both take turns; medians. On a GPU there are two more kinds of
steps, which are sampled without a graph, and the parts of a guided step are measured too. Results go to
guided.json and gpu_guided.json in bench/results.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

import segue
from bench import guided_parts, report, suite
from bench.model_dir import with_tokenizer
from segue.api.guided import guided_options
from segue.api.native import NativeSampling
from segue.frontend.detokenizer import TokenTable
from segue.guided import grammars
from segue.guided.follower import make_tokenizer
from segue.messages.guided import GrammarSpec, GuidedVocabulary

NUM_SCHEMAS = 200
BATCH = 16
NUM_TOKENS = 64  # of the timed requests
MAX_TOKENS = 1024  # of a schema's reply
COMPILE_BAR_MS, STEP_BAR = 5.0, 1.3
GPU_BATCH, GPU_STEP_BAR = 64, 1.1
# A string that is longer than the timed requests, so that nothing ends early; most tokens are allowed.
TIMED = {"type": "array", "items": {"type": "string", "minLength": 2000}, "minItems": 1}


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return the schema of an object with one to four properties, whose texts all have a bound."""
    names = rng.sample(["name", "id", "tags", "size", "city", "kind", "notes", "parent", "größe", 'a "b"'], 4)
    properties = {name: _random_value(rng, depth) for name in names[: rng.randint(1, 4)]}
    required = [name for name in properties if rng.random() < 0.7]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


def _random_value(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    scalars: list[dict[str, Any]] = [
        {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 30)},
        {"enum": ["red", "green", 7, None, True][: rng.randint(1, 5)]},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
        {"type": "number", "minimum": low, "maximum": low + 10, "multipleOf": 0.25},
        {"type": "boolean"},
        {"type": "string", "format": rng.choice(["date", "uuid", "time"])},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        {"const": {"x": [1, "two"]}},
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
    ]
    if depth and rng.random() < 0.4:
        least = rng.randint(0, 2)
        items = _random_value(rng, depth - 1)
        bounds = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
        return rng.choice([random_schema(rng, depth - 1), {"type": "array", "items": items, **bounds}])
    return rng.choice(scalars)


def prompt_of(schema: dict[str, Any]) -> str:
    """Return a chat that asks for an instance of the schema."""
    question = f"Answer with a JSON object that fits this schema: {json.dumps(schema)}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def answer(engine: Any, schemas: list[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """Answer all schemas, and count what came of them; `ids` are those of each reply.

    Requests always wait, so that no row stays empty until the longest reply of a batch ends.
    """
    params = [
        {
            "json_schema": schema,
            "temperature": temperature,
            "max_new_tokens": MAX_TOKENS,
            "sampling_seed": index,
        }
        for index, schema in enumerate(schemas)
    ]
    began = time.monotonic()
    with ThreadPoolExecutor(2 * BATCH) as pool:
        futures = [
            pool.submit(engine.generate, prompt_of(schema), each)
            for schema, each in zip(schemas, params, strict=True)
        ]
        for count, future in enumerate(as_completed(futures), 1):
            future.result()
            if count % 50 == 0 or count == len(schemas):
                seconds = time.monotonic() - began
                print(
                    f"temperature {temperature}: {count} of {len(schemas)} replies, {seconds:.0f} s",
                    flush=True,
                )
    ids, wrong, cut = list[list[int]](), list[str](), list[str]()
    for schema, future in zip(schemas, futures, strict=True):
        reply = future.result()
        ids.append(reply["output_ids"])
        told = f"{json.dumps(schema)} -> {reply['text']}"
        if reply["meta_info"]["finish_reason"]["type"] != "stop":
            cut.append(told)
        if not is_valid(reply["text"], schema):
            wrong.append(told)
    return {"ids": ids, "wrong": wrong, "cut": cut, "seconds": time.monotonic() - began}


FORMATS = jsonschema.FormatChecker(["date", "uuid"])
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)


@FORMATS.checks(
    "time"
)  # that of jsonschema is another one, of an old draft: it takes no zone and no fraction
def is_time(value: object) -> bool:
    """Whether a text is a full time of RFC 3339; what is no text passes."""
    return not isinstance(value, str) or TIME.fullmatch(value) is not None


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that fits the schema; formats count."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def vocabulary_of(tokenizer: Any) -> GuidedVocabulary:
    """Return the vocabulary of a tokenizer, as the engine's workers get it."""
    table = TokenTable.of(tokenizer.backend, tokenizer.special_ids, tokenizer.vocab_size)
    return GuidedVocabulary(
        tokens=table.tokens, special_ids=sorted(table.special_ids), eos_ids=sorted(tokenizer.eos_ids)
    )


def time_grammars(
    vocabulary: GuidedVocabulary, schemas: list[dict[str, Any]], replies: list[list[int]]
) -> dict[str, list[float]]:
    """Return the milliseconds of CPU time of each check, compilation and mask, and of the vocabulary."""
    began = time.thread_time()
    tokenizer = make_tokenizer(vocabulary)
    times: dict[str, list[float]] = {"vocabulary": [1e3 * (time.thread_time() - began)]}
    times |= {"check": [], "compile": [], "mask": []}
    mask = allocate_token_bitmask(1, len(vocabulary.tokens))
    for schema, ids in zip(schemas, replies, strict=True):
        options = guided_options(NativeSampling(json_schema=schema), {})
        spec: GrammarSpec = options["grammar"]
        began = time.thread_time()
        grammars.check(spec)
        times["check"].append(1e3 * (time.thread_time() - began))
        began = time.thread_time()
        matcher = LLMatcher(tokenizer, grammars.to_llguidance(spec), log_level=0)
        times["compile"].append(1e3 * (time.thread_time() - began))
        for token in ids:
            began = time.thread_time()
            fill_next_token_bitmask(matcher, mask)
            matcher.consume_token(token)
            times["mask"].append(1e3 * (time.thread_time() - began))
        assert not matcher.is_error(), matcher.get_error()
    return times


def step_ms(engine: Any, batch: int, params: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds of a step of `batch` rows that decode: by the clock, and of CPU time."""
    prompts = [f"Number {index}: " for index in range(batch)]
    seconds = []
    for count in (1, NUM_TOKENS + 1):
        began = time.perf_counter(), time.process_time()
        replies = engine.generate(prompts, params | {"max_new_tokens": count})
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        assert all(len(reply["output_ids"]) == count for reply in replies)
    (clock_before, cpu_before), (clock, cpu) = seconds
    return 1e3 * (clock - clock_before) / NUM_TOKENS, 1e3 * (cpu - cpu_before) / NUM_TOKENS


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest of some values."""
    found = np.quantile(values, [0.5, 0.99, 1.0]).tolist()
    return dict(zip(("p50", "p99", "max"), (round(value, 3) for value in found), strict=True))


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model", help="the model, or 0.6b or 8b with dummy weights; by default the bundled one"
    )
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="of the replies")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    batch, bar = (GPU_BATCH, GPU_STEP_BAR) if on_gpu else (BATCH, STEP_BAR)
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(0 if on_gpu else args.schemas)]
    with ExitStack() as stack:
        options: dict[str, Any] = {"model": args.model}
        if args.model in suite.SHAPES:
            path = stack.enter_context(with_tokenizer(Path(suite.model_dir(args.model))))
            options = {"model": str(path), "load_format": "dummy"}
        engine = stack.enter_context(
            segue.Engine(**options, max_running_requests=batch, device=args.device, embedded=not on_gpu)
        )
        vocabulary = vocabulary_of(engine.tokenizer)
        outcomes = {
            str(temperature): answer(engine, schemas, temperature) for temperature in args.temperature
        }
        sampled = {"temperature": 1.0, "sampling_seed": 1}
        kinds = {"unguided": sampled | {"ignore_eos": True}, "guided": sampled | {"json_schema": TIMED}}
        phases: dict[str, float] = {}
        for params in kinds.values():  # to warm up; the phases are those of guided steps without a penalty
            step_ms(engine, batch, params)
            phases = engine.get_server_info()["internal_states"][0].get("guided_ms", {})
        if on_gpu:
            kinds |= {f"{name} + penalty": each | {"presence_penalty": 0.1} for name, each in kinds.items()}
        steps: dict[str, list[float]] = {name: [] for name in kinds}
        cpu: dict[str, list[float]] = {name: [] for name in kinds}
        for repetition in range(args.repetitions + 1):
            pair = [step_ms(engine, batch, params) for params in kinds.values()]
            print(f"steps: repetition {repetition} of {args.repetitions}", flush=True)
            if repetition > 0:  # the first warms up
                for name, (clock_ms, cpu_ms) in zip(steps, pair, strict=True):
                    steps[name].append(round(clock_ms, 2))
                    cpu[name].append(round(cpu_ms, 2))
    timed = time_grammars(vocabulary, schemas, next(iter(outcomes.values()))["ids"])
    parts = {"phases of a step": phases}
    if on_gpu:
        size = len(vocabulary.tokens)
        parts["the host alone"] = guided_parts.host_ms(make_tokenizer(vocabulary), TIMED, batch, size)
        parts["processes alone"] = guided_parts.processes_ms(vocabulary, TIMED, batch)
        parts["the GPU alone"] = guided_parts.gpu_ms(batch, size)
    times = {name: quantiles(ms) for name, ms in timed.items() if ms}
    medians = {name: statistics.median(values) for name, values in steps.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu.items()}
    ratio = medians["guided"] / medians["unguided"]
    wrong = sum(len(outcome["wrong"]) for outcome in outcomes.values())
    by_length = sum(len(outcome["cut"]) for outcome in outcomes.values())
    for outcome in outcomes.values():
        for text in [*outcome["wrong"][:5], *outcome["cut"][:5]]:
            print(text)
    rows = [[name, *(f"{value:.2f}" for value in found.values())] for name, found in times.items()]
    report.show(f"{len(schemas)} schemas, ms", ["", "p50", "p99", "max"], rows)
    report.show(
        f"a step of {batch} rows, ms",
        [*medians, "ratio", "bar"],
        [[*(f"{ms:.2f}" for ms in medians.values()), f"{ratio:.2f}", f"{bar}"]],
    )
    for name, each in parts.items():
        table = [[part, f"{ms:.3f}"] for part, ms in each.items()]
        report.show(f"{name}, {batch} rows, ms", ["", "p50"], table)
    count = len(outcomes) * len(schemas)
    print(f"of {count} replies {wrong} are not valid, and {by_length} did not end by themselves")
    figures = {
        "model": options["model"],
        "batch": batch,
        "schemas": len(schemas),
        "replies": {
            name: {
                "count": len(outcome["ids"]),
                "not_valid": len(outcome["wrong"]),
                "by_length": len(outcome["cut"]),
                "tokens": sum(map(len, outcome["ids"])),
                "seconds": round(outcome["seconds"], 1),
            }
            for name, outcome in outcomes.items()
        },
        "ms": times,
        "compile_bar_ms": COMPILE_BAR_MS,
        "step_ms": medians,
        "step_ratio": round(ratio, 3),
        "step_bar": bar,
        "parts_ms": parts,
        "step_cpu_ms": cpu_medians,
        "step_cpu_ratio": round(cpu_medians["guided"] / cpu_medians["unguided"], 3),
        "repetitions": {"clock": steps, "cpu": cpu},
    }
    print(f"written to {report.save('gpu_guided' if on_gpu else 'guided', figures)}")
    slow = ratio > bar or any(times[name]["p99"] > COMPILE_BAR_MS for name in ("check", "compile") if schemas)
    return 1 if wrong or by_length or slow else 0


if __name__ == "__main__":
    sys.exit(main())
