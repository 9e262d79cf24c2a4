"""Log-probabilities of chosen tokens and of the most likely ones."""

import torch

from segue.sampling.logprobs import logprobs_of


def _logits() -> torch.Tensor:
    return torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 5


def test_chosen_and_top_logprobs_are_those_of_the_log_softmax():
    logits, tokens = _logits(), [4, 9, 0]
    expected = logits.double().log_softmax(-1)
    messages = logprobs_of(logits, torch.tensor(tokens), [2, 2, 2]).messages()
    for i, message in enumerate(messages):
        assert message.token == tokens[i]
        assert abs(message.logprob - expected[i, tokens[i]]) < 1e-5
        top = expected[i].topk(2)
        assert [token for token, _ in message.top] == top.indices.tolist()
        assert all(abs(a - b) < 1e-5 for (_, a), b in zip(message.top, top.values.tolist(), strict=True))


def test_a_rank_counts_the_likelier_tokens():
    logits = torch.tensor([[0.5, 2.0, 1.0, 2.0]] * 4)
    tokens = torch.tensor([1, 3, 2, 0])
    ranked = logprobs_of(logits, tokens, [0] * 4, with_ranks=True).messages()
    assert [message.rank for message in ranked] == [1, 1, 3, 4]
    assert {message.rank for message in logprobs_of(logits, tokens, [0] * 4).messages()} == {0}


def test_each_token_has_its_own_number_of_alternatives():
    messages = logprobs_of(_logits(), torch.tensor([1, 2, 3]), [0, 3, 1]).messages()
    assert [len(message.top) for message in messages] == [0, 3, 1]


def test_there_are_no_more_alternatives_than_tokens():
    messages = logprobs_of(_logits(), torch.tensor([1, 2, 3]), [60, 60, 60]).messages()
    assert [len(message.top) for message in messages] == [50, 50, 50]


def test_alternatives_of_a_row_do_not_depend_on_the_numbers_of_other_rows():
    logits = (
        torch.randn(4, 2000, generator=torch.Generator().manual_seed(2)) * 2
    ).round()  # many logits are equal
    tokens = torch.tensor([1, 2, 3, 4])
    alone = [
        logprobs_of(logits[i : i + 1], tokens[i : i + 1], [n]).messages() for i, n in enumerate([5, 0, 20, 5])
    ]
    assert logprobs_of(logits, tokens, [5, 0, 20, 5]).messages() == [message for (message,) in alone]
