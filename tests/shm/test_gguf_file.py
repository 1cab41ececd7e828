"""The GGUF parser: agrees with the reference package, and says ModelError for whatever is wrong with a file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shm.gguf_file import ARRAY, STRING, GgufFile
from shm.tensor_map import ModelError
from tests.model_factory import TinyLlama

U32, U64 = 4, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(layers=1).write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


def parse(folder: Path, content: bytes) -> GgufFile:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def assert_refused(folder: Path, content: bytes, *, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        parse(folder, content)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_agrees_with_the_reference_package(tmp_path: Path) -> None:
    path = TinyLlama().write_gguf(tmp_path / "m.gguf", "Q4_1")
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert {entry.name for entry in theirs.tensors} == ours.tensors.keys()
    for entry in theirs.tensors:
        own = ours.tensors[entry.name]
        assert own.kind == entry.tensor_type.name
        assert own.shape == tuple(int(size) for size in reversed(entry.shape))
        assert own.data.tobytes() == entry.data.tobytes()
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert fields.keys() == ours.metadata.keys()
    for name, value in fields.items():
        own_value = ours.metadata[name]
        if isinstance(own_value, bytes):
            own_value = own_value.decode()
        elif isinstance(own_value, list):
            own_value = ours.texts(name)
        elif isinstance(own_value, np.ndarray):
            own_value = own_value.tolist()
        assert own_value == value, name


def test_every_type_of_value(tmp_path: Path) -> None:
    values = {0: ("<B", 255), 1: ("<b", -1), 2: ("<H", 65535), 3: ("<h", -2), 4: ("<I", 2**32 - 1), 5: ("<i", -3)}
    values |= {6: ("<f", 0.5), 7: ("<?", True), 10: ("<Q", 2**64 - 1), 11: ("<q", -4), 12: ("<d", 1e300)}
    keys = [key(f"k{kind}", kind, struct.pack(code, value)) for kind, (code, value) in values.items()]
    keys += [
        key(f"a{kind}", ARRAY, struct.pack("<IQ", kind, 2) + struct.pack(code, value) * 2)
        for kind, (code, value) in values.items()
    ]
    file = parse(
        tmp_path, file_of([*keys, key("s", STRING, text("é")), key("e", ARRAY, struct.pack("<IQ", U32, 0))], [])
    )
    for kind, (_, value) in values.items():
        assert file.metadata[f"k{kind}"] == value
        assert type(file.metadata[f"k{kind}"]) is type(value)
        array = file.metadata[f"a{kind}"]
        assert isinstance(array, np.ndarray)
        assert array.tolist() == [value, value]
    assert (file.text("s"), file.integers("e"), file.flag("k7", False), file.real("k6")) == ("é", [], True, 0.5)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda file: file.integer("s"), "s is not an integer"),
        (lambda file: file.integer("absent"), "lack absent"),
        (lambda file: file.real("s"), "not a number"),
        (lambda file: file.text("i"), "not a string"),
        (lambda file: file.text("bad"), "bad is not UTF-8"),
        (lambda file: file.flag("i", True), "not a boolean"),
        (lambda file: file.texts("i"), "not an array of strings"),
        (lambda file: file.integers("s"), "not an array of integers"),
    ],
)
def test_values_of_another_type_are_errors(tmp_path: Path, read: object, says: str) -> None:
    keys = [key("s", STRING, text("x")), key("i", U32, struct.pack("<I", 1)), key("bad", STRING, text(b"\xff"))]
    file = parse(tmp_path, file_of(keys, []))
    with pytest.raises(ModelError, match=says):
        read(file)  # type: ignore[operator]


def test_what_is_not_gguf(tmp_path: Path, tiny: Path) -> None:
    content = tiny.read_bytes()
    with pytest.raises(ModelError, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")
    assert_refused(tmp_path, b"", says="empty")
    assert_refused(tmp_path, b"PK\3\4" + content[4:], says="not a GGUF file")
    assert_refused(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", says="Git LFS pointer")
    assert_refused(tmp_path, b"GGUF" + struct.pack(">I", 3) + content[8:], says="little-endian")
    assert_refused(tmp_path, file_of([], [], version=1), says="version 1")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "folder.gguf")


HUGE = 2**64 - 1
ONE_F32 = [tensor("t", (1,))]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "do not fit"),
        (file_of([struct.pack("<Q", HUGE)], []), "ends at byte"),
        (file_of([key("k", STRING, struct.pack("<Q", HUGE))], []), "ends at byte"),
        (file_of([key("k", ARRAY, struct.pack("<IQ", U64, HUGE))], []), "ends at byte"),
        (file_of([key("k", ARRAY, struct.pack("<IQ", STRING, HUGE))], []), "claims"),
        (file_of([key("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))], []), "within k"),
        (file_of([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "unknown type 9"),
        (file_of([key("k", 99, b"")], []), "unknown type 99"),
        (file_of([key("k", U32, b"1234")] * 2, []), "k is there twice"),
        (file_of([text(b"\xff\xfe") + struct.pack("<I", U32) + b"1234"], []), "not UTF-8"),
        (file_of([key("general.alignment", U32, struct.pack("<I", 0))], []), "alignment is 0"),
        (file_of([key("general.alignment", U32, struct.pack("<I", 2**31))], []), "alignment"),
        (file_of([], [text("t") + struct.pack("<I", HUGE >> 32)]), "dimensions"),
        (file_of([], [tensor("t", ())], b"1234"), "tensor t has 0 dimensions"),
        (file_of([], [tensor("t", (0,))], b"1234"), "tensor t has the impossible shape"),
        (file_of([], [tensor("t", (2**63, 2))], b"1234"), "tensor t has the impossible shape"),
        (file_of([], [tensor("t", (33, 2), kind=8)], b"1" * 99), "tensor t has shape .* whole Q8_0 blocks"),
        (file_of([], [tensor("t", (256,), kind=12)], b"1" * 999), "tensor t has type Q4_K, which is not supported"),
        (file_of([], [tensor("t", (256,), kind=999)], b"1" * 999), "tensor t has type number 999"),
        (file_of([], ONE_F32 * 2, b"1234"), "tensor t is there twice"),
        (file_of([], ONE_F32, b"123"), "tensor t ends at byte"),
        (file_of([], [tensor("t", (1,), offset=HUGE)], b"1234"), "tensor t ends at byte"),
    ],
)
def test_hostile_lengths_counts_and_offsets(tmp_path: Path, content: bytes, says: str) -> None:
    assert_refused(tmp_path, content, says=says)


def test_a_file_cut_short_anywhere_is_an_error(tmp_path: Path, tiny: Path) -> None:
    content = tiny.read_bytes()
    head = len(content) - sum(entry.data.size for entry in GgufFile(tiny).tensors.values())
    # Behind the last tensor there is only padding, which may be missing.
    end = len(content.rstrip(b"\0"))
    for length in [*range(0, head, 97), *range(head, end, 9001), end - 1]:
        assert_refused(tmp_path, content[:length], says="empty" if length == 0 else "GGUF")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutations_parse_or_are_model_errors(tmp_path: Path, tiny: Path, data: st.DataObject) -> None:
    content = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Most of what can go wrong is in the first bytes and in the table of tensors.
        at = data.draw(st.one_of(st.integers(0, 900), st.integers(0, 12000)))
        patch = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\1" * 4]))
        )
        content[at : at + len(patch)] = patch
    try:
        file = parse(tmp_path, bytes(content))
    except ModelError as error:
        assert "\n" not in str(error)
        return
    for entry in file.tensors.values():
        assert entry.data.size <= len(content)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
@example(b"")
def test_noise_after_the_magic(tmp_path: Path, noise: bytes) -> None:
    try:
        parse(tmp_path, b"GGUF" + struct.pack("<I", 3) + noise)
    except ModelError:
        pass


def test_words_of_a_hostile_file_cannot_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    assert_refused(tmp_path, file_of([key("\x1b[2J\r\n", 99, b"")], []), says=r"\\x1b\[2J\\r\\n has unknown type 99")
    with pytest.raises(ModelError) as caught:
        parse(tmp_path, file_of([key("k" * 100_000, 99, b"")], []))
    assert len(str(caught.value)) < 1100
