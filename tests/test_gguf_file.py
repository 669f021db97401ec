from pathlib import Path

import pytest
from gguf import GGUFReader

from asyncserve.errors import CheckpointError
from asyncserve.gguf_file import read_gguf_header
from tests.fakes.demo_model import demo_model_path
from tests.fakes.gguf_files import write_gguf


def test_values_come_back_as_the_format_library_wrote_them(tmp_path: Path) -> None:
    metadata = {
        "a.text": "naïve ▁ text",
        "a.flag": True,
        "a.number": 4_000_000_000,
        "a.real": 0.5,
        "a.texts": ["", "x", "日本"],
        "a.numbers": [1, -2, 3],
        "a.reals": [0.25, -1.0],
        "a.flags": [True, False],
    }
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert {key: header.metadata[key] for key in ("a.text", "a.flag", "a.number", "a.real")} == {
        "a.text": "naïve ▁ text",
        "a.flag": True,
        "a.number": 4_000_000_000,
        "a.real": 0.5,
    }
    assert header.metadata["a.texts"] == ["", "x", "日本"]
    assert list(header.metadata["a.numbers"]) == [1, -2, 3]
    assert list(header.metadata["a.reals"]) == [0.25, -1.0]
    assert header.metadata["a.flags"] == [True, False]


def test_tensors_lie_where_the_format_library_finds_them(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={"a.weight": (3, 4), "b.weight": (5,), "c": (2, 3, 4)})
    tensors = read_gguf_header(path).tensors
    for theirs in GGUFReader(path).tensors:
        ours = tensors[theirs.name]
        assert ours.shape == tuple(theirs.data.shape)
        assert (ours.type_id, ours.offset) == (theirs.tensor_type, theirs.data_offset)


@pytest.mark.slow
def test_the_demo_model_is_read_as_the_format_library_reads_it() -> None:
    header = read_gguf_header(demo_model_path())
    reader = GGUFReader(demo_model_path())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            ours = header.metadata[key]
            assert (list(ours) if not isinstance(ours, int | float | str) else ours) == field.contents()
    assert [(t.name, t.type_id, t.offset) for t in header.tensors.values()] == [
        (t.name, t.tensor_type, t.data_offset) for t in reader.tensors
    ]


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(
        tmp_path / "m.gguf", tokens=["a", "b", "c"], merges=["a b"], metadata={"a.reals": [0.5] * 9}
    ).read_bytes()
    data_begins = len(whole) - 64  # three rows of four float32, padded
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        if length > data_begins:
            break
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut short|not a GGUF|cannot be read"):
            read_gguf_header(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "GGUF version 1;"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "big-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "damaged"),
    ],
)
def test_what_is_no_readable_gguf_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read"):
        read_gguf_header(tmp_path / "none.gguf")
