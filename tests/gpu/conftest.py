import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
