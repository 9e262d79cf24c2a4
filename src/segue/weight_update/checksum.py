"""Checksums of tensors as sent: a trainer computes them before it sends, the engine after all is received."""

from torch import Tensor

from segue.memory.checksum import MASK, digest


def checksum(tensor: Tensor) -> int:
    """Returns a 64-bit checksum of `tensor`'s bytes in row order; 0 for an empty tensor.

    It is the same on every device, and does not depend on dtype and shape.
    """
    return int(digest(tensor.contiguous())) & MASK
