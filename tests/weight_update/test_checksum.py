import pytest
import torch

from segue.weight_update.checksum import checksum

MASK = (1 << 64) - 1
FACTOR = 0x1E3779B97F4A7C15


def by_hand(raw: bytes) -> int:
    def scramble(word: int) -> int:
        word = word * FACTOR & MASK
        high = word >> 32  # with the sign, as a signed number is shifted
        return word ^ (high | (0xFFFFFFFF00000000 if word >> 63 else 0))

    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[start : start + 8], "little") for start in range(0, len(raw), 8)]
    return sum(scramble(word) * (scramble(place) | 1) for place, word in enumerate(words)) & MASK


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 8 * (1 << 15) + 3])
def test_the_checksum_is_that_of_the_bytes(size: int) -> None:
    torch.manual_seed(size)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert checksum(raw) == by_hand(raw.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_checksum_does_not_depend_on_offset_and_strides(dtype: torch.dtype) -> None:
    values = torch.randn(7, 9).to(dtype)
    shifted = torch.empty(1 + 63, dtype=dtype)[1:].view(7, 9).copy_(values)
    turned = torch.empty(9, 7, dtype=dtype).t().copy_(values)
    assert (
        checksum(values)
        == checksum(shifted)
        == checksum(turned)
        == by_hand(values.view(torch.uint8).numpy().tobytes())
    )


def test_the_checksum_changes_with_a_sign_bit_and_with_a_swap() -> None:
    values = torch.arange(100, dtype=torch.float32)
    before = checksum(values)
    values[5], values[6] = 6.0, 5.0
    assert checksum(values) != before
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(-1.5))
