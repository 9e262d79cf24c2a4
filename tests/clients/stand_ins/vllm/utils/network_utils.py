"""The address of this host."""


def get_ip() -> str:
    raise NotImplementedError("the stand-in joins no group")
