"""One rank's model on its device: initialised step by step, it then runs one step plan after another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from segue.checkpoint import hub
from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.messages.control import InitStep
from segue.messages.guided import GuidedVocabulary
from segue.messages.life import HeldKV
from segue.messages.steps import StepPlan
from segue.model_runner.executor import ForwardOutput, Result, make_stream
from segue.model_runner.startup import Made, Startup
from segue.models import weight_map
from segue.options import parse_list
from segue.weight_update.served import ServedWeights

NUM_RECENT = 8  # steps that others can queue work behind; at most 2 are in flight
GENERATING_S = 0.1  # the time without a step after which the engine counts as not generating


class ModelRunner:
    """Runs step plans on one rank. Every rank runs the same plans in the same order."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        tp: TPInfo,
        run_dir: Path,
        report: Callable[[InitStep, int], None],
        begin: Callable[[str, int], None] = lambda name, num_steps: None,
        on_bytes: Callable[[int, int], None] | None = None,
        on_kernels: Callable[[int, int], None] | None = None,
    ) -> None:
        """Take the steps of `Startup`, each timed and reported.

        Args:
            config: the options of the engine.
            source: the checkpoint to load the weights from.
            tp: this rank.
            run_dir: a directory for the rendezvous of all ranks.
            report: called after each step, in order, with the number of all steps.
            begin: called before each step with its name and the number of all steps.
            on_bytes: called while weights are loaded, with the bytes so far and in all; then nothing else
                shows this progress.
            on_kernels: called while kernels are compiled, with the number so far and in all.

        Raises:
            SegueError: a problem that the user can solve, with device, sizes, memory or model files.
        """
        self._startup = made = Startup(config, source, tp, run_dir, on_bytes=on_bytes, on_kernels=on_kernels)
        first, *rest = steps = made.steps()
        _run_steps([first], len(steps), begin, report)  # chooses the device, whose stream runs the others
        self.tp = tp
        self.device, self.dtype = made.resolved.device, made.resolved.dtype
        self._stream = make_stream(self.device)
        # On the stream of the steps: if two threads ran parallel operations, GNU's OpenMP would count more
        # threads than cores and never let a thread spin while it waits (a step would take twice as long).
        self._stream.submit(partial(_run_steps, rest, len(steps), begin, report)).result()
        self._executor = made.executor
        self._last_step_at = float("-inf")  # when a step was submitted
        self._recent: dict[int, ForwardOutput] = {}  # the last NUM_RECENT steps
        self.kv, self.kv_descriptor = made.kv, made.memory.kv_descriptor
        self.model, self.memory = made.model, made.memory
        self.limits = made.limits
        self.graph_costs = made.graph_costs
        self.step_times = made.step_times
        self.source = source
        self.model_config, self.vocab_size = source.config, source.config.vocab_size
        self.attention_backend = made.selection.name
        self.arena, self.weight_bytes = made.arena, made.arena.num_bytes
        self.kv, self.kv_bytes = made.kv, made.kv.data.nbytes

    def forward_batch(self, plan: StepPlan) -> ForwardOutput:
        """Submit a step and return at once; steps run in the order they are submitted.

        A step may be submitted before the result of the previous one is read: its decode rows read their
        input tokens where the previous step writes them.
        """
        self._last_step_at = time.monotonic()
        # A guided step is sampled when its masks are there, behind what the host does meanwhile. With several
        # ranks all of them take part in sampling, and some may get nothing else to launch behind a step.
        apart = plan.sampling_mode == "guided" and self.tp.size == 1
        pending = self._stream.submit_halves(partial(self._executor.start, plan), apart=apart)
        output = ForwardOutput(pending, self._stream.finish)
        self._recent[plan.step] = output
        self._recent.pop(plan.step - NUM_RECENT, None)
        return output

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        """Take the vocabulary, which must come before the first guided request."""
        assert self._startup.matchers is not None, "only the rank that samples guides"
        self._startup.matchers.set_vocabulary(vocabulary)

    def can_guide(self) -> bool:
        """Whether guided requests may begin now; asked for after `set_vocabulary`."""
        assert self._startup.matchers is not None, "only the rank that samples guides"
        return self._startup.matchers.can_begin()

    def forget(self, slots: Sequence[int]) -> None:
        """Forget the grammars of slots that no submitted step uses."""
        if self._startup.matchers is not None:
            self._startup.matchers.forget(slots)

    def guided_ms(self) -> dict[str, float]:
        """Return the median milliseconds of the phases of guided steps."""
        return {} if self._startup.matchers is None else self._startup.matchers.median_ms()

    def queue_behind(self, step: int) -> None:
        """Let what the calling thread does next come behind a step that was submitted; raises its error.

        On a CPU the thread waits for the step. On CUDA only the thread's current stream does, and the thread
        goes on at once. Any thread may call it.
        """
        if (output := self._recent.get(step)) is not None:  # an older one has ended
            output.queue_behind()

    def deep_ping(self) -> None:
        """Run a tiny operation on the stream of the steps, and wait for it: then the device works."""
        self.on_stream(lambda: torch.ones(1, device=self.device).add_(1).item())

    def wake(self, epoch: int = 0, timeout_s: float = 0.0) -> HeldKV | None:
        """Take what the runner lacks in order to serve, on the stream of the steps; see `RankMemory.wake`.

        Returns the memory of the KV cache, if it is kept for the next engine.

        Raises:
            Exception: the memory cannot be had; the engine cannot serve.
        """
        self.on_stream(partial(self._startup.memory.wake, epoch, timeout_s))
        return self.memory.held_kv

    def served_weights(self) -> ServedWeights:
        """Return the weights that the model serves with, for weight updates."""
        made, config = self._startup, self._startup.config
        allow = config.weights_master_allow
        return ServedWeights(
            arena=self.arena,
            weight_map=weight_map.build(made.source.config, self.tp),
            config=made.source.config,
            tp=self.tp,
            memory=made.memory,
            dtype=self.dtype,
            submit=self._stream.submit,
            rebuild=made.model.build_derived,
            packer=made.model.packer,
            cache_dir=Path(config.cache_dir),
            revisions=hub.revisions(config.model, config.revision),
            seed=config.seed,
            master_allow=tuple(parse_list(allow, "weights_master_allow")) if allow else (),
            reserved=int(config.weight_staging_gb * 1e9),
            headroom=made.headroom,
            receive_share=config.weight_receive_share,
            is_generating=lambda: time.monotonic() - self._last_step_at < GENERATING_S,
        )

    def on_stream(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the stream of the steps, after all submitted steps, and wait for it."""
        return self._stream.submit(work).result()

    def submit_long(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work` that takes long behind all submitted steps, and return at once."""
        return self._stream.submit_long(work)

    def close(self) -> None:
        """Finish all submitted steps and stop."""
        self._stream.close()
        if self._startup.matchers is not None:
            self._startup.matchers.close()
        self._startup.free_masks()
        descriptor, self.kv_descriptor = self.kv_descriptor, None
        if descriptor is not None:  # it would keep the memory after the end of an embedded engine
            os.close(descriptor)
        self.memory.close()


def _run_steps(
    steps: list[tuple[str, Callable[[], Made]]],
    num_steps: int,
    begin: Callable[[str, int], None],
    report: Callable[[InitStep, int], None],
) -> None:
    """Run steps of the start in order, and report each with its seconds, its bytes and what it says.

    `num_steps` counts all steps of the start, which are run in two parts, for the reports.
    """
    for name, step in steps:
        begin(name, num_steps)
        started = time.monotonic()
        num_bytes, detail = step()
        report(InitStep(name, time.monotonic() - started, num_bytes, detail), num_steps)
