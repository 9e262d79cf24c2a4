"""Runs the pinned offline workload on Segue, with the figures of its peers, and scores its tokens again.

    python -m bench.offline 0.6b [--option=value …]

--deterministic=1, --attention-backend=NAME, --quantization=fp8 and --kv-cache-dtype=fp8 have result files of
their own.

The suite has the prompts and the clock; this adapter runs the batches, on a default `segue.Engine` without
prefix cache, with a context of 4096 and 256 running requests. It keeps the output tokens: afterwards, four
requests of each kind of call are scored teacher-forced by an eager forward, because the speed of wrong tokens
does not count. Beside each figure stands the share of its roofline that it reaches. Ready counts from the
start of this process, imports included, as the suite counts it for its own engine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TextIO

from bench import report, roofline, suite
from bench.starting import WORKLOAD, age, engine_options
from segue import Engine
from segue.bench.offline import Batch, generate
from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.errors import ConfigError

if TYPE_CHECKING:  # it imports torch and transformers, and the engine is to start before that
    from bench.rescore import Produced, Score

RESCORED = 4  # requests of each kind of call
LONG = 100_000  # output tokens of a call that is long enough to sample the GPU's clocks
FIGURE = re.compile(
    r"RESULT \S+ \S+ (.+?) (?:output_tok_per_s|step_ms|median_ms|tok_per_s)=([\d.]+)"
)  # engine and size, then name and value


class Adapter:
    """The suite's `generate`; keeps the last call of each kind, and the clocks of the first long call."""

    def __init__(self, engine: Engine) -> None:
        from bench.rescore import Produced

        self._engine, self._produced = engine, Produced
        self.calls: dict[str, list[Produced]] = {}
        self.clocks: report.Clocks | None = None

    def __call__(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[int]:
        """Run a batch with EOS ignored, and return the number of output tokens of each request."""
        batch = Batch(prompts=prompts, max_tokens=max_tokens, temperature=temperature)
        if self.clocks is None and sum(max_tokens) > LONG:
            with report.Clocks() as self.clocks:
                replies = generate(self._engine, batch)
        else:
            replies = generate(self._engine, batch)
        self.calls[f"{len(prompts)} x {max(map(len, prompts))} + {max(max_tokens)}"] = [
            self._produced(prompt=prompt, output=reply["output_ids"], temperature=temperature, seed=seed)
            for seed, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        ]
        return [len(reply["output_ids"]) for reply in replies]


def spread(requests: Sequence[Produced], count: int) -> list[Produced]:
    """Return `count` requests: the shortest, the longest, and some between."""
    ordered = sorted(requests, key=lambda request: len(request.prompt) + len(request.output))
    if len(ordered) <= count:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (count - 1)] for i in range(count)]


def figures(lines: Sequence[str]) -> dict[str, float]:
    """Return milliseconds or tokens/s by figure from the suite's RESULT lines; medians of repetitions."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if match := FIGURE.match(line):
            found.setdefault(match[1], []).append(float(match[2]))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    """Run the benchmark; the exit code is 1 if a token is wrong."""
    parser = argparse.ArgumentParser(
        usage="python -m bench.offline SIZE [--option=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", choices=suite.SHAPES, help="of the model")
    args, rest = parser.parse_known_args()
    try:
        options = engine_options(rest)
    except ConfigError as error:
        parser.error(error.message)
    size = args.size
    with Engine(suite.model_dir(size), **{**WORKLOAD, **options}) as engine:
        ready = age()
        print(f"RESULT segue {size} ready seconds={ready:.1f}", flush=True)
        adapter = Adapter(engine)
        printed = _Tee(sys.stdout)
        with contextlib.redirect_stdout(printed):
            suite.run("segue-deterministic" if engine.config.deterministic else "segue", size, adapter)
    config = engine.config
    measured = figures(printed.getvalue().splitlines())
    model_config = resolve(config.model, "dummy", config.cache_dir, quantization=config.quantization).config
    fp8, fp8_kv = model_config.fp8 is not None, config.kv_cache_dtype != "auto"
    rooflines = roofline.figures(model_config, roofline.Machine(), fp8_kv=fp8_kv)
    tokens = {"offline256": sum(roofline.offline256_lengths()[1]), "prefill 64x2048": 64 * 2048}
    reached = {
        name: value / (tokens[name] / rooflines[name].seconds)
        if name in tokens
        else rooflines[name].seconds * 1e3 / value
        for name, value in measured.items()
    }
    report.show(
        f"{result_name(size, config, fp8=fp8)}: tokens/s or ms",
        ["", "measured", "roofline, ms", "of the roofline"],
        [
            [name, f"{value:.6g}", f"{rooflines[name].seconds * 1e3:.3f}", f"{reached[name]:.0%}"]
            for name, value in measured.items()
        ],
    )
    stored = result_name(size, config, fp8=fp8)
    found = {
        "options": options,
        "clocks": adapter.clocks.seen if adapter.clocks else {},
        "ready, s": round(ready, 1),
        "figures": measured,
        "of the floor": {  # the share of the roofline, under the key of the results that are already stored
            name: round(value, 3) for name, value in reached.items()
        },
        "lines": [line.removeprefix("RESULT ") for line in printed.getvalue().splitlines()],
    }
    report.save(stored, found)  # in case scoring fails
    scores = score_again(teacher_config(config), adapter.calls)
    found["scored again"] = {kind: asdict(score) for kind, score in scores.items()}
    print(f"written to {report.save(stored, found)}")
    return 1 if any(score.wrong for score in scores.values()) else 0


def result_name(size: str, config: EngineConfig, *, fp8: bool) -> str:
    """Return the name of the result file; what changes the figures is in it. `fp8`: of weights."""
    backend = config.attention_backend.replace(",", "-")
    variants = {
        backend: backend != "auto",
        "deterministic": config.deterministic,
        "fp8": fp8,
        "fp8_kv": config.kv_cache_dtype != "auto",
    }
    return "_".join(["gpu_offline", size, *(name for name, is_on in variants.items() if is_on)])


def teacher_config(config: EngineConfig) -> EngineConfig:
    """Return the options of the eager forward that scores tokens: in float32 too, so with any backend."""
    return replace(config, disable_cuda_graph=True, deterministic=False, attention_backend="auto")


def score_again(config: EngineConfig, calls: Mapping[str, Sequence[Produced]]) -> dict[str, Score]:
    """Score RESCORED requests of each kind of call."""
    from bench.rescore import Teacher, allowed, rescore, rounding

    teacher = Teacher(config)
    exact = teacher.in_float32()
    longest = max(
        (request for requests in calls.values() for request in requests), key=lambda r: len(r.output)
    )
    noise = rounding(teacher, exact, longest)
    del exact
    bound = allowed(noise)
    print(f"rounding changes a logit by {noise:.4f} (rms): a regret may be {bound:.4f}", flush=True)
    scores = {}
    for kind, requests in calls.items():
        scores[kind] = rescore(teacher, spread(requests, RESCORED), bound)
        print(f"scored again, {kind}: {scores[kind]}", flush=True)
    return scores


class _Tee(io.StringIO):
    """Keeps the text that it passes on to a stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()


if __name__ == "__main__":
    sys.exit(main())
