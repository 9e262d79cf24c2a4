"""Memory of the host that the driver refuses to pin: here because it is pinned already."""

from __future__ import annotations

import pytest
import torch

from segue.memory import backing

pytestmark = pytest.mark.gpu


def test_a_refusal_to_pin_memory_is_a_warning_and_no_later_error(caplog: pytest.LogCaptureFixture) -> None:
    raw = backing.page_locked(1 << 20)
    assert raw.is_pinned()
    assert not backing.lock(raw, "nothing is lost")
    assert "cannot be pinned for the GPU" in caplog.text and "nothing is lost" in caplog.text
    assert raw.to("cuda", non_blocking=True).sum().item() == 0, "the next launches know nothing of it"
    torch.cuda.synchronize()
    backing.unlock(raw)
    assert not raw.is_pinned()
    backing.unlock(raw)  # once more, as of memory that was never pinned
    torch.cuda.synchronize()
