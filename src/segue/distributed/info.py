"""The rank of a process in its tensor-parallel group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TPInfo:
    """A process's rank in its tensor-parallel group, and the group's size. `TPInfo(0, 1)`: no other rank."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Reject a rank outside its group. It is a bug of the launcher, not an error of the user."""
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which plans and samples."""
        return self.rank == 0
