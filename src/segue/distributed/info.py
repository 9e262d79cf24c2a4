"""Where one process stands in its tensor-parallel group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TPInfo:
    """Rank and size of the tensor-parallel group; `TPInfo(0, 1)` is a single process."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Reject a rank outside its group: that is a bug of the launcher, not of the user."""
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that plans and samples."""
        return self.rank == 0
