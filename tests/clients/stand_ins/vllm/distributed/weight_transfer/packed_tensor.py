"""The trainer's broadcasts."""


def packed_nccl_broadcast_producer(*_: object) -> None:
    raise NotImplementedError("the stand-in sends nothing")
