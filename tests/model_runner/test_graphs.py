from segue.model_runner.graphs import MOST_PADDING, pick, row_sizes, token_sizes


def test_every_number_of_rows_has_a_bucket_with_little_padding() -> None:
    for most in (1, 7, 12, 100, 256, 300):
        sizes = row_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for rows in range(1, most + 1):
            found = pick(sizes, rows)
            assert found is not None and rows <= found <= max(rows + 16, rows * 5 // 4)


def test_every_number_of_tokens_up_to_the_most_has_a_bucket() -> None:
    sizes = token_sizes(8448)
    assert sizes[0] == 16 and sizes[-1] == 1024
    for tokens in range(1, 1025):
        found = pick(sizes, tokens)
        assert found is not None and tokens <= found <= max(16, tokens * MOST_PADDING)
    assert pick(sizes, 1025) is None


def test_a_runner_of_few_tokens_has_no_larger_buckets() -> None:
    assert token_sizes(60) == [16, 32, 48]


def test_a_step_is_not_padded_to_a_multiple_of_itself() -> None:
    assert pick([16, 64], 20) is None
    assert pick([16, 64], 32) == 64
    assert pick([16, 64], 3) == 16
    assert pick([], 3) is None
