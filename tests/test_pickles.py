"""The family's files are read exactly, and hostile ones refused before anything runs."""

from __future__ import annotations

import builtins
import collections
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch

from nanochat.errors import UserError
from nanochat.interop.pickles import read_encoding
from nanochat.interop.torch_archive import read_torch

GOLDEN_RUN = Path(__file__).parent / "golden" / "run"
MODEL = GOLDEN_RUN / "base_checkpoints" / "d2" / "model_000060.pt"
OPTIMIZER = MODEL.with_name("optim_000060_rank0.pt")
TOKENIZER = GOLDEN_RUN / "tokenizer" / "tokenizer.pkl"


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for mine, value in zip(ours, theirs, strict=True):
            assert_same(mine, value)
    else:
        assert ours == theirs


@pytest.mark.parametrize("path", [MODEL, OPTIMIZER, GOLDEN_RUN / "tokenizer" / "token_bytes.pt"], ids=lambda p: p.name)
def test_family_archives_read_as_torch_reads_them(path: Path) -> None:
    assert_same(read_torch(path), torch.load(path, weights_only=True))


def test_archives_of_many_kinds_read_as_torch_reads_them(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    module = torch.nn.Linear(3, 2)
    saved = {
        "views": [base[2:8].view(2, 3), base.view(4, 6).t(), base.view(4, 6)[:, 1:3]],
        "dtypes": [
            base.to(dtype)
            for dtype in (
                torch.bfloat16,
                torch.float16,
                torch.float64,
                torch.int64,
                torch.int32,
                torch.uint8,
                torch.bool,
            )
        ],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(base.clone()),
        "state": module.state_dict(),
        "plain": (None, True, False, 1, -1, 300, 70_000, 2**40, 1.5, "text", [], (), {}, (1, 2, 3, 4)),
        7: "number key",
    }
    path = tmp_path / "many.pt"
    torch.save(saved, path)
    assert_same(read_torch(path), torch.load(path, weights_only=True))


def test_writing_to_a_read_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(4)}, path)
    before = path.read_bytes()
    read_torch(path)["a"].zero_()
    assert path.read_bytes() == before


def test_archives_without_check_sums_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(4)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(read_torch(path), {"a": torch.ones(4)})


def test_the_family_tokenizer_reads_as_pickle_reads_it() -> None:
    with TOKENIZER.open("rb") as file:
        encoding = pickle.load(file)
    data = read_encoding(TOKENIZER)
    assert data.pattern == encoding._pat_str
    assert data.mergeable_ranks == encoding._mergeable_ranks
    assert data.special_tokens == encoding._special_tokens


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tokenizers_of_every_pickle_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    encoding = tiktoken.Encoding(
        "mine", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={"<|é|>": 256}
    )
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(encoding, protocol=protocol))
    if protocol == 2:  # it writes bytes as a call of an encoder, which no file of the family does
        with pytest.raises(UserError, match="refused"):
            read_encoding(path)
    else:
        assert read_encoding(path).special_tokens == {"<|é|>": 256}


def test_tuples_nest_only_as_deep_as_real_files_need(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.pkl"
    for depth, said in ((32, "does not hold a tiktoken encoding"), (33, "nests tuples more than 32 deep")):
        path.write_bytes(b"\x80\x02)" + b"\x85q\x00" * (depth - 1) + b"N\x86.")
        with pytest.raises(UserError, match=said):
            read_encoding(path)


def test_the_number_of_instructions_is_bounded(tmp_path: Path) -> None:
    """A file of allowed size could keep the reader busy for a minute otherwise."""
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(b"\x80\x02]" + b"Na" * 500_000 + b".")
    with pytest.raises(UserError, match="more than 1,000,000 instructions"):
        read_encoding(path)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class CallWithState(Call):
    """Pickles as an object that is then given a state."""

    def __reduce__(self) -> Any:
        return (*self.call, {"__setstate__": print, "items": 1})


def dumps(value: Any, protocol: int = 2) -> bytes:
    return pickle.dumps(value, protocol=protocol)


def text(value: str) -> bytes:
    """The instruction that pushes a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def storage_id(key: str = "0", count: int = 4, kind: bytes = b"ctorch\nFloatStorage\n") -> bytes:
    """Instructions that push a storage."""
    return b"(" + text("storage") + kind + text(key) + text("cpu") + b"J" + struct.pack("<i", count) + b"tQ"


def tensor(size: bytes, stride: bytes, offset: bytes = b"K\x00", storage: bytes | None = None) -> bytes:
    """A pickle of one tensor over a storage of four floats."""
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    start = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return start + (storage or storage_id()) + offset + size + stride + hooks + b"tR."


def hostile_pickles(marker: Path) -> dict[str, bytes]:
    touch = f"open({str(marker)!r}, 'w')"
    encoding_class = b"\x80\x04\x8c\rtiktoken.core\x8c\x08Encoding\x93)\x81"
    return {
        "os.system": dumps(Call(os.system, f"touch {marker}")),
        "builtins.eval": dumps(Call(builtins.eval, touch)),
        "builtins.exec, protocol 4": dumps(Call(builtins.exec, touch), 4),
        "open": dumps(Call(open, str(marker), "w")),
        "getattr": dumps(Call(getattr, "", "join")),
        "nested in a value": dumps({"weight": [1, (Call(os.system, f"touch {marker}"),)]}),
        "in a dict key": b"\x80\x02}" + dumps(Call(os.system, f"touch {marker}"))[2:-1] + b"K\x01s.",
        "in a state": b"\x80\x02ccollections\nOrderedDict\n)R" + dumps({"x": Call(eval, touch)})[2:-1] + b"b.",
        "attributes of a dict": b"\x80\x02ccollections\nOrderedDict\n)R}" + text("items") + b"K\x01sb.",
        "setstate": dumps(CallWithState(collections.OrderedDict)),
        "filled OrderedDict": dumps(Call(collections.OrderedDict, [("a", 1)])),
        "dotted global": b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93.",
        "attribute of an allowed class": b"\x80\x04\x8c\x0bcollections\x8c\x1aOrderedDict.__subclasses__\x93)R.",
        "global by no text": b"\x80\x04K\x01K\x02\x93.",
        "global by a nested list": b"\x80\x04" + b"]\x94" + b"(h\x00h\x00e\x94" * 40 + b"\x8c\x01x\x93.",
        "call of a text": b"\x80\x02" + text("os.system") + text(f"touch {marker}") + b"\x85R.",
        "call of a storage type": b"\x80\x02ctorch\nFloatStorage\n)R.",
        "new object of a module": b"\x80\x02cos\nsystem\n)\x81.",
        "INST": b"(" + text(f"touch {marker}") + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + text(f"touch {marker}") + b"o.",
        "NEWOBJ_EX": b"\x80\x04cos\nsystem\n)}\x92.",
        "extension registry": b"\x80\x02\x82\x01)R.",
        "textual persistent id": b"P0\n.",
        "persistent id of no storage": b"\x80\x02" + text("module") + b"Q.",
        "persistent id of a module": b"\x80\x02(" + text("module") + text("a") + text("b") + b"tQ.",
        "missing storage": tensor(b"K\x04\x85", b"K\x01\x85", storage=storage_id("../../../etc/passwd")),
        "longer storage": tensor(b"K\x04\x85", b"K\x01\x85", storage=storage_id(count=5)),
        "wider storage": tensor(b"K\x04\x85", b"K\x01\x85", storage=storage_id(kind=b"ctorch\nDoubleStorage\n")),
        "negative storage": tensor(b"K\x04\x85", b"K\x01\x85", storage=storage_id(count=-1)),
        "shape outside": tensor(b"K\x05\x85", b"K\x01\x85"),
        "stride outside": tensor(b"K\x02\x85", b"K\x04\x85"),
        "offset outside": tensor(b"K\x04\x85", b"K\x01\x85", b"K\x01"),
        "negative offset": tensor(b"K\x01\x85", b"K\x01\x85", b"J\xff\xff\xff\xff"),
        "negative stride": tensor(b"K\x02\x85", b"J\xff\xff\xff\xff\x85", b"K\x02"),
        "expanded to terabytes": tensor(b"J\xff\xff\xff\x7f\x85", b"K\x00\x85"),
        "more axes than any tensor": tensor(b"(" + b"K\x01" * 9 + b"t", b"(" + b"K\x01" * 9 + b"t"),
        "shape beyond 64 bits": tensor(b"\x8a\x0a" + b"\xff" * 9 + b"\x01K\x00\x86", b"K\x01K\x01\x86"),
        "tensor without storage": tensor(b"K\x04\x85", b"K\x01\x85", storage=text("x")),
        "parameter of a text": b"\x80\x02ctorch._utils\n_rebuild_parameter\n" + text("x") + b"\x85R.",
        "memo of nothing": b"\x80\x02h\x07.",
        "empty stack": b"\x80\x02\x85.",
        "no end": b"\x80\x02K\x01",
        "mark as a value": b"\x80\x02(\x85.",
        "deep key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
        "deep value": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "unhashable key": b"\x80\x02}]K\x01s.",
        "huge length": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
        "unknown instruction": b"\x80\x02\xfe.",
        "encoding in a model": encoding_class + b".",
        "not a pickle": b"<html>404</html>",
        "empty": b"",
    }


HOSTILE = sorted(hostile_pickles(Path("marker")))


def archive(
    path: Path, data: bytes, extra: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    """A file as torch.save would write it around a pickle, with one storage of four floats."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {
            "m/data.pkl": data,
            "m/byteorder": sys.byteorder.encode(),
            "m/data/0": struct.pack("<4f", 1, 2, 3, 4),
            **(extra or {}),
        }.items():
            file.writestr(name, content)
    return path


def test_the_hand_made_archive_is_read_when_it_is_honest(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.pt", tensor(b"K\x02K\x02\x86", b"K\x02K\x01\x86"))
    assert_same(read_torch(path), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_file_is_refused_and_runs_nothing(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    path = archive(tmp_path / "m.pt", hostile_pickles(marker)[name])
    with pytest.raises(UserError, match=r"m\.pt"):
        read_torch(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "encoding in a model"])
def test_a_hostile_tokenizer_is_refused_and_runs_nothing(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(hostile_pickles(marker)[name])
    with pytest.raises(UserError, match=r"tokenizer\.pkl"):
        read_encoding(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "state",
    [
        {"name": "x", "pat_str": "."},
        {"name": "x", "pat_str": ".", "mergeable_ranks": {b"a": 1}, "special_tokens": {}, "_core_bpe": 1},
        {"name": "x", "pat_str": ".", "mergeable_ranks": {"a": 1}, "special_tokens": {}},
        {"name": "x", "pat_str": ".", "mergeable_ranks": {b"a": -1}, "special_tokens": {}},
        {"name": "x", "pat_str": ".", "mergeable_ranks": {b"a": 1.5}, "special_tokens": {}},
        {"name": "x", "pat_str": 1, "mergeable_ranks": {}, "special_tokens": {}},
        "cl100k_base",
    ],
)
def test_an_encoding_with_another_state_is_refused(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "tokenizer.pkl"
    body = pickle.dumps(state, protocol=4)[2:]
    path.write_bytes(b"\x80\x04\x8c\rtiktoken.core\x8c\x08Encoding\x93)\x81" + body[:-1] + b"b.")
    with pytest.raises(UserError, match=r"tokenizer\.pkl"):
        read_encoding(path)


def test_an_encoding_given_no_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(hostile_pickles(tmp_path)["encoding in a model"])
    with pytest.raises(UserError, match="does not hold a tiktoken encoding"):
        read_encoding(path)


def test_files_of_before_torch_1_6_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"before torch 1\.6"):
        read_torch(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_short_model_file_is_refused(tmp_path: Path, share: float) -> None:
    data = MODEL.read_bytes()
    path = tmp_path / "m.pt"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=r"m\.pt"):
        read_torch(path)


def test_a_flipped_bit_is_found_by_its_check_sum(tmp_path: Path) -> None:
    data = bytearray(MODEL.read_bytes())
    data[len(data) // 2] ^= 1
    path = tmp_path / "m.pt"
    path.write_bytes(data)
    with pytest.raises(UserError, match="check sum"):
        read_torch(path)


@pytest.mark.parametrize("kind", ["compressed", "two pickles", "same name twice", "other byte order", "no pickle"])
def test_archives_that_torch_never_writes_are_refused(tmp_path: Path, kind: str) -> None:
    good, path = tensor(b"K\x04\x85", b"K\x01\x85"), tmp_path / "m.pt"
    if kind == "compressed":  # a small file that would unpack to a vast one
        archive(path, good, {"m/data/1": bytes(10_000_000)}, zipfile.ZIP_DEFLATED)
    elif kind == "two pickles":
        archive(path, good, {"n/data.pkl": good})
    elif kind == "other byte order":
        archive(path, good, {"m/byteorder": b"big" if sys.byteorder == "little" else b"little"})
    elif kind == "no pickle":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("m/data/0", b"1234")
    else:
        archive(path, good)
        with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("m/data.pkl", dumps(1))
    with pytest.raises(UserError, match=r"m\.pt"):
        read_torch(path)


def test_entries_that_reach_beyond_the_file_are_refused(tmp_path: Path) -> None:
    """The directory at the end of the file claims a longer entry than there is."""
    path = archive(tmp_path / "m.pt", tensor(b"K\x04\x85", b"K\x01\x85"))
    with zipfile.ZipFile(path) as file:
        start = file.start_dir
    data = bytearray(path.read_bytes())
    data[start + 20 : start + 28] = struct.pack("<II", 1 << 30, 1 << 30)  # sizes of the first entry
    path.write_bytes(data)
    with pytest.raises(UserError, match="not stored plainly inside the file"):
        read_torch(path)


def test_missing_files_are_told(tmp_path: Path) -> None:
    for read in (read_torch, read_encoding):
        with pytest.raises(UserError, match="cannot be read"):
            read(tmp_path / "absent")
