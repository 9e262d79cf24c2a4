"""Measures what a decode step costs the host: the scheduler and the msgspec messages, without a device.

256 requests decode; the pages that they fill are appended and go into the prefix cache. Every message is
encoded and decoded as between processes: the plan for a rank, the result, the output for the frontend.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

import msgspec

from bench import report
from segue.config import EngineConfig
from segue.messages.control import EngineLimits, SchedulerOutput
from segue.messages.requests import AddRequest, SamplingParams, pack_ids
from segue.messages.steps import StepPlan, StepResult
from segue.scheduler.scheduler import Scheduler

BAR_MS = 0.5


def measure(
    *, num_requests: int, num_steps: int, page_size: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the mean milliseconds per step by ``clock``, by part."""
    rng = random.Random(0)
    scheduler = Scheduler(
        EngineLimits(
            num_pages=num_requests * 1024 // page_size,
            page_size=page_size,
            max_seq_len=4096,
            max_running_requests=num_requests,
            chunked_prefill_size=1 << 20,
        ),
        EngineConfig(max_queued_requests=num_requests),
    )
    params = SamplingParams(max_new_tokens=num_steps + 100, temperature=0.6)
    for index in range(num_requests):
        prompt = [rng.randrange(150_000) for _ in range(rng.randint(100, 200))]
        scheduler.add(AddRequest(rid=f"{index:032x}", prompt=pack_ids(prompt), params=params), clock())
    encode = msgspec.msgpack.Encoder().encode
    plan_decoder = msgspec.msgpack.Decoder(StepPlan)
    result_decoder = msgspec.msgpack.Decoder(StepResult)
    output_decoder = msgspec.msgpack.Decoder(SchedulerOutput)
    seconds = {"plan": 0.0, "plan_message": 0.0, "result_message": 0.0, "apply": 0.0, "output_message": 0.0}

    def turn() -> None:
        """Do all that the host does for one step, with random tokens in place of the device's, and time it.

        Each message is encoded and decoded, as on its way to another process.
        """
        t0 = clock()
        plan = scheduler.plan(t0)
        t1 = clock()
        plan_decoder.decode(encode(plan))
        t2 = clock()
        assert plan is not None
        tokens = [rng.randrange(150_000) for _ in range(sum(plan.samples))]
        t3 = clock()
        result = result_decoder.decode(encode(StepResult(plan.step, tokens, 0.001)))
        t4 = clock()
        output = scheduler.apply(result, t4)
        t5 = clock()
        output_decoder.decode(encode(output))
        t6 = clock()
        for part, spent in zip(seconds, (t1 - t0, t2 - t1, t4 - t3, t5 - t4, t6 - t5), strict=True):
            seconds[part] += spent

    for _ in range(8):
        turn()  # prefill, then warm-up
    assert len(scheduler.running) == num_requests
    cached = scheduler.resources.prefix.num_pages
    for part in seconds:
        seconds[part] = 0.0
    for _ in range(num_steps):
        turn()
    inserted = scheduler.resources.prefix.num_pages - cached
    assert inserted >= num_requests * (num_steps // page_size), "every full page goes into the prefix cache"
    parts = {part: 1e3 * spent / num_steps for part, spent in seconds.items()}
    return {"total": sum(parts.values()), **parts, "pages_inserted_per_step": inserted / num_steps}


def main() -> int:
    """Run the benchmark; the exit code is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=256)
    args = parser.parse_args()
    figures = {
        f"page size {size}": {
            part: round(value, 4)
            for part, value in measure(
                num_requests=args.requests, num_steps=args.steps, page_size=size
            ).items()
        }
        for size in (16, 64)
    }
    worst = max(each["total"] for each in figures.values())
    rows = [[name, f"{each['total']:.3f}", f"{BAR_MS:g}"] for name, each in figures.items()]
    report.show(f"host ms per decode step of {args.requests} requests", ["", "mean", "bar"], rows)
    record = {"unit": "ms", "worst": worst, "bar": BAR_MS, "requests": args.requests, "steps": args.steps}
    print(f"written to {report.save('host_cost', {**record, **figures})}")
    return 0 if worst <= BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
