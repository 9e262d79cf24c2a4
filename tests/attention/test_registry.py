import pytest
import torch

from segue.attention.registry import names, select
from segue.errors import ConfigError

CPU = torch.device("cpu")


def test_auto_takes_the_cpu_backend_on_a_cpu() -> None:
    assert select("auto", device=CPU, dtype=torch.bfloat16, page_size=1).name == "cpu"


def test_an_unknown_backend_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError) as error:
        select("warp", device=CPU, dtype=torch.float32, page_size=16)
    assert "warp" in error.value.message
    assert all(name in error.value.message for name in names())


@pytest.mark.parametrize(
    ("device", "dtype", "word"), [("cuda", torch.float32, "cuda"), ("cpu", torch.float64, "float64")]
)
def test_a_backend_that_does_not_fit_says_why(device: str, dtype: torch.dtype, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        select("cpu", device=torch.device(device), dtype=dtype, page_size=16)
    assert word in error.value.message
