import torch

from segue.dtypes import FLOATS, ITEM_SIZES, SAFETENSORS


def test_names_and_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_SIZES} == ITEM_SIZES
    assert len(ITEM_SIZES) == len(SAFETENSORS)
    assert all(getattr(torch, name).is_floating_point for name in FLOATS)


def test_the_names_of_safetensors_are_those_of_the_package() -> None:
    from safetensors.torch import _TYPES  # the package's own table

    known = {name: dtype for name, dtype in _TYPES.items() if name in SAFETENSORS}
    assert known == {name: getattr(torch, dtype) for name, (dtype, _) in SAFETENSORS.items()}
