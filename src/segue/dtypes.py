"""The dtypes of tensors by name. With torch, `getattr(torch, name)` is the dtype that has torch's name."""

# The name in safetensors files -> torch's name, and the bytes of an element.
SAFETENSORS = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
ITEM_SIZES = dict(SAFETENSORS.values())  # torch's name -> bytes of an element
WEIGHTS = ("F64", "F32", "F16", "BF16")  # the dtypes that weights may have, as safetensors files name them
FLOATS = tuple(SAFETENSORS[name][0] for name in WEIGHTS)  # the same, as torch names them
FP8_BLOCK = 128  # rows and columns of a block of a weight in FP8 that has a scale of its own
