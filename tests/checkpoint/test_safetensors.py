import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.checkpoint.model_files import open_file
from segue.checkpoint.safetensors import StoredTensor, open_writer, read_header
from segue.errors import ModelFileError

INFINITE = b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}'
TENSORS = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@contextmanager
def opened(path: Path) -> Iterator[dict[str, StoredTensor]]:
    with open_file(path) as file:
        yield {tensor.name: tensor for tensor in read_header(file)}


def check(path: Path) -> None:
    with opened(path):
        pass


def read(tensor: StoredTensor, offset: int = 0, num_bytes: int | None = None) -> bytes:
    target = bytearray(tensor.num_bytes - offset if num_bytes is None else num_bytes)
    tensor.read_into(offset, memoryview(target))
    return bytes(target)


def test_reads_names_shapes_types_and_bytes(path: Path) -> None:
    with opened(path) as tensors:
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
            "a": (torch.float32, (2, 3)),
            "b": (torch.bfloat16, (5,)),
        }
        assert read(tensors["a"]) == TENSORS["a"].numpy().tobytes()
        assert read(tensors["b"]) == TENSORS["b"].view(torch.int16).numpy().tobytes()


def test_reads_a_part_of_a_tensor(path: Path) -> None:
    with opened(path) as tensors:
        assert read(tensors["a"], 8, 12) == TENSORS["a"].numpy().tobytes()[8:20]


def test_the_safetensors_package_reads_written_files(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with open_writer(path, {"a": (torch.float32, (2, 3)), "b": (torch.bfloat16, (5,))}) as file:
        data = TENSORS["a"].numpy().tobytes()
        file.write(data[:5])
        file.write(data[5:])
        file.write(TENSORS["b"].view(torch.int16).numpy().tobytes())
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "data must be aligned"
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError, match=f"cannot open model file {tmp_path / 'no.safetensors'}: No such file"
    ):
        check(tmp_path / "no.safetensors")


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_shorter_than_its_length_field_is_truncated(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelFileError, match=f"{path} is truncated: it has {size} bytes"):
        check(path)


def test_a_file_that_ends_in_its_header_is_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(ModelFileError, match=f"{path} is truncated: its header alone needs"):
        check(path)


def test_a_file_that_ends_in_a_tensor_names_the_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=f"{path} is truncated: tensor 'b' ends at byte"):
        check(path)


def test_a_file_that_shrinks_after_it_was_opened_names_the_tensor(path: Path) -> None:
    with opened(path) as tensors:
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(ModelFileError, match=f"{path} is truncated: it ends within tensor 'b'"):
            read(tensors["b"])


def test_a_file_of_another_format_is_corrupt(path: Path) -> None:
    path.write_bytes(b"\x80\x02}q\x00(X\x0a\x00\x00\x00" * 20)
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: not a safetensors file"):
        check(path)


@pytest.mark.parametrize(
    "header", [b"{nonsense", b"[1, 2]", {"a": 3}, {"a": {"dtype": "F32"}}, b"\xff\xff", INFINITE]
)
def test_an_invalid_header_is_corrupt(path: Path, header: object) -> None:
    write_header(path, header)
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: its header cannot be read"):
        check(path)


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_named(path: Path) -> None:
    write_header(path, {"w": entry(0, 8, [3])}, bytes(8))
    with pytest.raises(ModelFileError, match=r"tensor 'w' of shape \[3\] and type F32 cannot lie in bytes"):
        check(path)


def test_a_tensor_that_overlaps_another_is_named(path: Path) -> None:
    write_header(path, {"v": entry(0, 8, [2]), "w": entry(4, 12, [2])}, bytes(12))
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: tensor 'w'"):
        check(path)


def test_a_tensor_of_unknown_type_is_named(path: Path) -> None:
    write_header(path, {"w": entry(0, 8, [2], "F3")}, bytes(8))
    with pytest.raises(ModelFileError, match="tensor 'w' has type 'F3'"):
        check(path)


def test_bytes_after_the_last_tensor_are_corrupt(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12")
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: 2 bytes follow"):
        check(path)


def test_a_directory_in_place_of_a_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"model file {tmp_path} is no regular file"):
        check(tmp_path)


def test_a_deeply_nested_header_is_corrupt(path: Path) -> None:
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: its header cannot be read"):
        check(path)
