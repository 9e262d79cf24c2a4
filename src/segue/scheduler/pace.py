"""When the next step is launched: at once behind a short step, late behind a long one."""

from __future__ import annotations

from collections import deque

from segue.laps.cost import CostModel
from segue.laps.pick import PrefillPolicy
from segue.scheduler.request import Request, Step

# The next step waits for the end of one that takes so long and has so many tokens. Behind shorter steps it
# would cost too much: 5 % of the throughput of prefill at 18 ms per step (measured). With LAPS, shorter steps
# with a chunk of a long prompt are waited for too, if a short prompt is likely: it would wait for two chunks.
LONG_STEP_S, MANY_TOKENS, BLOCKING_STEP_S = 0.05, 512, 0.008
LEAD_S = 0.003  # the next step is launched so long before the expected end
NUM_LAUNCHES = 8  # launches of large steps whose times are kept


class Pace:
    """How long steps take, as far as the results of earlier ones tell. Times are in seconds."""

    def __init__(self) -> None:
        self._last_end = 0.0  # when the last step whose result was applied had ended
        self._launches: deque[float] = deque(maxlen=NUM_LAUNCHES)  # seconds that the host took for each

    def launched(self, step: Step, now: float) -> None:
        """Note that the host has planned and launched a step, and is free again."""
        if step.work.tokens >= MANY_TOKENS:
            self._launches.append(now - step.planned_at)

    def ended(self, step: Step, now: float) -> float:
        """Note the end of the oldest step; returns the seconds that it took on the device."""
        seconds = now - max(step.planned_at, self._last_end)
        self._last_end = now
        return seconds

    def launch_at(self, step: Step, cost: CostModel, policy: PrefillPolicy[Request], now: float) -> float:
        """Returns when the next step should be launched, a little before ``step``, in flight, is to end.

        A launched step cannot be cancelled, so a pause or a new request has to wait for all that are in
        flight. Behind a short step the next one is launched at once: the device would wait for the host
        whenever the end is predicted a little late, and this would cost more than it gains.

        While chunks of long prompts follow each other because of short ones, a launch begins early enough to
        be over when ``step`` ends. While the host launches, it does not see that a step has ended, and takes
        the time at which it looks for the end. The next launch would then be as late, and the device would
        wait for it: 3 % of the time with a launch of 13 ms per step of 60 ms (simulated).
        """
        work, long_work = step.work, step.long_work
        if not work.prompt_tokens or (work.tokens < MANY_TOKENS and not long_work.prompt_tokens):
            return now
        seconds = cost.seconds(work)
        least, lead = LONG_STEP_S, LEAD_S
        if long_work.prompt_tokens and policy.expects_short(seconds, now):
            least, lead = BLOCKING_STEP_S, LEAD_S + max(self._launches, default=0.0)
        return max(step.planned_at, self._last_end) + seconds - lead if seconds >= least else now
