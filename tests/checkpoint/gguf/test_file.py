import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from segue.checkpoint import model_files
from segue.checkpoint.gguf import file
from segue.checkpoint.gguf.file import GGUFFile
from segue.errors import ModelFileError, WeightSyncError
from tests.checkpoint import tiny, tiny_gguf


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    types = {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0}
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size(), hidden_size=96, num_hidden_layers=1)
    return tiny_gguf.write(path, model, types=types).read_bytes()


@pytest.fixture
def path(content: bytes, tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").write_bytes(content)
    return tmp_path / "model.gguf"


def test_metadata_equals_that_of_the_gguf_package(path: Path) -> None:
    fields = gguf.GGUFReader(path).fields
    found = GGUFFile.read(path).metadata
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    assert plain == {key: fields[key].contents() for key in plain}
    assert found.keys() == {key for key in fields if not key.startswith("GGUF.")}


def test_tensors_equal_those_of_the_gguf_package(path: Path) -> None:
    expected = {
        t.name: (t.tensor_type, tuple(reversed(t.shape.tolist())), t.data_offset, t.data_offset + t.n_bytes)
        for t in gguf.GGUFReader(path).tensors
    }
    found = GGUFFile.read(path).tensors
    assert {name: (t.type, t.shape, t.start, t.end) for name, t in found.items()} == expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"cannot open model file {tmp_path / 'no.gguf'}: No such file"):
        GGUFFile.read(tmp_path / "no.gguf")


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04" * 9])
def test_a_file_of_another_format_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=f"{path} is not a GGUF file"):
        GGUFFile.read(path)


@pytest.mark.parametrize("size", [4, 7, 30, 500, 3000])
def test_a_file_that_ends_in_its_header_is_truncated(path: Path, size: int) -> None:
    os.truncate(path, size)
    with pytest.raises(ModelFileError, match=f"{path} is truncated: it ends within its header"):
        GGUFFile.read(path)


def test_a_file_that_ends_in_a_tensor_is_truncated_and_names_the_tensor(path: Path) -> None:
    tensors = sorted(GGUFFile.read(path).tensors.values(), key=lambda tensor: tensor.start)
    os.truncate(path, tensors[5].end - 1)
    with pytest.raises(ModelFileError, match=f"{path} is truncated: tensor '{tensors[5].name}' ends"):
        GGUFFile.read(path)


def test_an_unsupported_version_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content[:4] + (3).to_bytes(4, "big") + content[8:])
    with pytest.raises(ModelFileError, match="GGUF version 0x3000000; supported: 2 and 3, little-endian"):
        GGUFFile.read(path)


def test_a_tensor_of_unknown_type_is_named(path: Path, content: bytes) -> None:
    start = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(content[:start] + (250).to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelFileError, match=r"tensor 'output_norm.weight' has an unknown type, number 250"):
        GGUFFile.read(path)


def test_a_value_of_unknown_type_is_corrupt(path: Path, content: bytes) -> None:
    start = content.index(b"general.name") + len(b"general.name")
    path.write_bytes(content[:start] + (99).to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: its header cannot be read"):
        GGUFFile.read(path)


def test_a_type_that_does_not_divide_the_rows_is_corrupt(path: Path, content: bytes) -> None:
    q4_k = int(gguf.GGMLQuantizationType.Q4_K)
    start = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    path.write_bytes(content[:start] + q4_k.to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelFileError, match=r"tensor 'token_embd.weight' of shape .* cannot have type Q4_K"):
        GGUFFile.read(path)


def test_one_part_of_several_is_an_error(tmp_path: Path) -> None:
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size())
    path = tiny_gguf.write(tmp_path / "a.gguf", model, extra={"split.count": 3})
    with pytest.raises(ModelFileError, match="one of 3 parts; merge them"):
        GGUFFile.read(path)


@pytest.mark.parametrize("key", ["split.count", "general.alignment"])
def test_a_number_that_is_text_is_corrupt(tmp_path: Path, key: str) -> None:
    model = tiny.make("llama", vocab_size=tiny_gguf.vocab_size())
    path = tiny_gguf.write(tmp_path / "a.gguf", model, extra={"general.thing": "text"})
    content = path.read_bytes()
    old, new = b"general.thing", key.encode()
    path.write_bytes(
        content.replace(len(old).to_bytes(8, "little") + old, len(new).to_bytes(8, "little") + new)
    )
    with pytest.raises(ModelFileError, match=f"{path} is corrupt: its header cannot be read"):
        GGUFFile.read(path)


SHORTENED = """
import os, sys
from pathlib import Path
from segue.errors import ModelFileError
from segue.checkpoint.gguf import file as gguf_file

path, take = Path(sys.argv[1]), gguf_file._Cursor.take

def shorten(cursor, layout):
    if cursor.position > 500:
        os.truncate(path, 4)
    return take(cursor, layout)

gguf_file._Cursor.take = shorten
try:
    gguf_file.GGUFFile.read(path)
except ModelFileError as error:
    print(error.message)
"""


def zeros(path: Path, size: int) -> None:
    """Writes a file of `size` bytes whose header is a sequence of keys that are all zeros."""
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60))
    os.truncate(path, size)


def test_a_file_that_is_truncated_while_it_is_read_does_not_kill_the_process(path: Path) -> None:
    zeros(path, 8 << 20)
    child = subprocess.run(
        [sys.executable, "-c", SHORTENED, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "is truncated: it ends within its header" in child.stdout


def test_an_endless_header_of_zeros_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_MAX_HEADER", 1 << 20)
    zeros(path, 8 << 20)
    with pytest.raises(ModelFileError, match=r"its header cannot be read .*it has more than 1048576 bytes"):
        GGUFFile.read(path)


def test_a_text_longer_than_any_header_is_refused_before_it_is_read(path: Path) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62))
    with pytest.raises(ModelFileError, match=r"its header cannot be read .*it has more than 67108864 bytes"):
        GGUFFile.read(path)


def test_reading_a_header_can_be_cancelled(path: Path) -> None:
    zeros(path, 8 << 20)
    answers = iter([False] * 3)
    with (
        model_files.reading(model_files.Reading(is_cancelled=lambda: next(answers, True))),
        pytest.raises(WeightSyncError, match="discarded"),
    ):
        GGUFFile.read(path)
