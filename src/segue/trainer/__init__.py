"""The training side of weight updates: `WeightSender` for training loops, and a small training server."""

from __future__ import annotations

from segue.trainer.endpoint import Answer, Endpoint
from segue.trainer.sender import Progress, SendReport, WeightSender, WeightSendError

__all__ = ["Answer", "Endpoint", "Progress", "SendReport", "WeightSendError", "WeightSender"]
