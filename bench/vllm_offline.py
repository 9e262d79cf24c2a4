"""Runs the pinned offline workload on vLLM, for `bench.peers`; needs vLLM.

python -m bench.vllm_offline 0.6b | tee theirs.log
"""

from __future__ import annotations

import json
import os
import sys
import time

from bench import report, suite
from segue.doctor.versions import version_of


def main() -> None:
    """Run the suite with settings as close to those of `bench.offline` as vLLM has them."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    size, begun = sys.argv[1], time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        suite.model_dir(size),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        gpu_memory_utilization=0.85,
        dtype="bfloat16",
        seed=0,
        max_num_seqs=256,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )
    found = report.circumstances() | {"vllm": version_of("vllm")}
    print(f"CIRCUMSTANCES {json.dumps(found)}", flush=True)
    print(f"RESULT vllm {size} ready seconds={time.perf_counter() - begun:.1f}", flush=True)

    def generate(prompts: list[list[int]], tokens: list[int], temperature: float) -> list[int]:
        """Run all requests at once; see `suite.Generate`."""
        params = [
            SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in tokens
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(o.outputs[0].token_ids) for o in llm.generate(requests, params, use_tqdm=False)]

    suite.run("vllm", size, generate)


if __name__ == "__main__":
    main()
