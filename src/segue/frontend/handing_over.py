"""Which requests of a prefill and a decode engine go from one to the other, and which each computes alone."""

from __future__ import annotations

from segue.messages.requests import SamplingParams

# Log-probabilities of a prompt go with its KV, over the connection of all requests of two engines.
MOST_LOGPROB_BYTES = 8 << 20


def goes_on_elsewhere(params: SamplingParams, prompt_len: int) -> bool:
    """Whether a decode engine goes on with what a prefill engine has computed.

    It does not if no token is asked for, nor if the prompt's log-probabilities are too large to be sent.
    """
    if params.max_new_tokens == 0:
        return False
    first = params.prompt_logprobs_start
    num_entries = prompt_len - first if first >= 0 else 0
    return num_entries * (16 + 15 * params.num_prompt_top) <= MOST_LOGPROB_BYTES  # bytes of msgpack
