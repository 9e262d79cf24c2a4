"""A minimal scheduler: it writes step plans for a few requests, and runs them on one runner."""

from dataclasses import dataclass, field
from typing import Any

from segue.messages.requests import SamplingParams, TokenLogprob, pack_ids
from segue.messages.steps import NewSlot, StepPlan, StepResult
from segue.model_runner.executor import ForwardOutput
from segue.model_runner.runner import ModelRunner


@dataclass
class Sequence:
    """One request: its tokens and its progress."""

    slot: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # positions computed, or being computed
    launched: int = 0  # tokens that are known, or being sampled
    is_new: bool = True
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Planner:
    """Adds requests, plans steps over any of them, and reads the results."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step = 0
        self.free_pages = list(range(runner.limits.num_pages))[::-1]
        self.free_slots = list(range(runner.limits.max_running_requests))[::-1]

    def add(self, prompt: list[int], *, prompt_len: int | None = None, **params: Any) -> Sequence:
        """Add a request; if it returns after a retraction, `prompt_len` is less than the number of tokens."""
        options = {"max_new_tokens": 1000, "temperature": 0.0, **params}
        length = len(prompt) if prompt_len is None else prompt_len
        sequence = Sequence(self.free_slots.pop(), list(prompt), length, SamplingParams(**options))
        sequence.launched = len(prompt)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Give back the slot and the pages."""
        self.free_slots.append(sequence.slot)
        self.free_pages += sequence.pages

    def plan(self, work: list[tuple[Sequence, int]], sampling_mode: str | None = None) -> StepPlan:
        """Plan a step of `(sequence, tokens)`; a sequence samples if it reaches its last known token."""
        self.step += 1
        size = self.runner.limits.page_size
        new_slots, pages, starts, num_logits, samples = [], [], [], [], []
        work = sorted(work, key=lambda item: item[1] != 1 or item[0].is_new)
        num_decode = sum(count == 1 and not sequence.is_new for sequence, count in work)
        for sequence, count in work:
            if sequence.is_new:
                tokens = pack_ids(sequence.tokens)
                new_slots.append(NewSlot(sequence.slot, tokens, sequence.prompt_len, sequence.params))
                sequence.is_new = False
                if sequence.pages:  # shared with another sequence, which has computed them
                    pages.append((sequence.slot, 0, list(sequence.pages)))
            end = sequence.computed + count
            missing = -(-end // size) - len(sequence.pages)
            if missing > 0:
                taken = [self.free_pages.pop() for _ in range(missing)]
                pages.append((sequence.slot, len(sequence.pages), taken))
                sequence.pages += taken
            last = end == sequence.launched
            first = sequence.params.prompt_logprobs_start
            num_prompt_logprobs = 0
            if first >= 0:
                num_prompt_logprobs = max(
                    0, min(end, sequence.prompt_len - 1) - max(sequence.computed, first - 1)
                )
            starts.append(sequence.computed)
            num_logits.append(end - max(sequence.computed, first - 1) if num_prompt_logprobs else int(last))
            samples.append(last)
            sequence.computed = end
            sequence.launched += last
        sampling_modes = {
            "full" if s.params.prompt_logprobs_start >= 0 else s.params.sampling_mode for s, _ in work
        }
        return StepPlan(
            step=self.step,
            new_slots=new_slots,
            pages=pages,
            num_decode=num_decode,
            slots=[sequence.slot for sequence, _ in work],
            starts=starts,
            lens=[count for _, count in work],
            num_logits=num_logits,
            samples=samples,
            sampling_mode=sampling_mode
            or next(mode for mode in ("full", "guided", "filtered", "plain") if mode in sampling_modes),
        )

    def launch(self, work: list[tuple[Sequence, int]], sampling_mode: str | None = None) -> "Launched":
        """Submit a step without reading its result."""
        plan = self.plan(work, sampling_mode)
        by_slot = {sequence.slot: sequence for sequence, _ in work}
        return Launched(self.runner.forward_batch(plan), plan, by_slot)

    def run(self, work: list[tuple[Sequence, int]], sampling_mode: str | None = None) -> StepResult:
        """Submit a step and read its result."""
        return self.launch(work, sampling_mode).read()

    def prefill(self, sequence: Sequence, chunk: int = 1 << 30) -> None:
        """Compute all known tokens, at most `chunk` per step, and sample one token."""
        known = len(sequence.tokens)
        while sequence.computed < known:
            self.run([(sequence, min(chunk, known - sequence.computed))])

    def decode(self, sequences: list[Sequence], steps: int, sampling_mode: str | None = None) -> None:
        """Run `steps` steps with one token for each sequence."""
        for _ in range(steps):
            self.run([(sequence, 1) for sequence in sequences], sampling_mode)

    def generate(self, prompt: list[int], count: int, chunk: int = 1 << 30, **params: Any) -> Sequence:
        """Run one request from start to end, alone."""
        sequence = self.add(prompt, **params)
        self.prefill(sequence, chunk)
        self.decode([sequence], count - 1)
        self.remove(sequence)
        return sequence


@dataclass
class Launched:
    """A step in flight."""

    output: ForwardOutput
    plan: StepPlan
    by_slot: dict[int, Sequence]

    def read(self) -> StepResult:
        """Wait for the result, and add its tokens and log-probabilities to the sequences."""
        result = self.output.result()
        sampling = [slot for slot, samples in zip(self.plan.slots, self.plan.samples, strict=True) if samples]
        logprobs = result.logprobs or [None] * len(sampling)
        for slot, token, logprob in zip(sampling, result.tokens, logprobs, strict=True):
            self.by_slot[slot].tokens.append(token)
            self.by_slot[slot].logprobs.append(logprob)
        for slot, entries in result.prompt_logprobs.items():
            self.by_slot[slot].prompt_logprobs += entries
        return result
