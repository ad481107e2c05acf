"""Reads ``torch.save`` files of the family without unpickling, see :mod:`nanochat.interop.pickles`."""

from __future__ import annotations

import math
import mmap
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.errors import UserError
from nanochat.interop.pickles import MAX_PICKLE_BYTES, Builders, Global, Refused, interpret, unreadable

#: Tensors of the family have up to three axes.
MAX_AXES = 8

_STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


def read_torch(path: Path) -> Any:
    """Read a ``torch.save`` archive: plain containers, numbers, texts and tensors.

    Tensors are mapped from the file, privately: only what is used is read, and writing to one leaves the file alone.

    Raises:
        UserError: when the file is absent, damaged, of the format before torch 1.6, or holds anything else.
    """
    try:
        archive = _Archive(path)
    except OSError as error:
        raise unreadable(path, error) from None
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise UserError(f"{path} is cut short or no torch archive ({error}): copy it again") from None
    builders: Builders = {
        "collections.OrderedDict": dict,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        **dict.fromkeys(_STORAGE_DTYPES, _not_callable),
    }
    return interpret(archive.pickle, path, builders, archive.storage)


@dataclass(frozen=True)
class _Storage:
    """One storage of an archive, as a flat tensor."""

    flat: Tensor


def _not_callable(*_: Any) -> None:
    raise Refused("it calls a storage type")


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    """A view of a storage; nothing outside the storage is reachable, and nothing in it is multiplied."""
    if not isinstance(storage, _Storage) or type(size) is not tuple or type(stride) is not tuple:
        raise Refused("it builds a tensor from something else than a storage")
    if not len(size) == len(stride) <= MAX_AXES or any(
        type(number) is not int or number < 0 for number in (offset, *size, *stride)
    ):
        raise Refused("it builds a tensor of an impossible shape")
    count, room = math.prod(size), storage.flat.numel()
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if count > room or (count and last >= room):
        raise Refused("it builds a tensor that reaches outside its storage")
    return storage.flat.as_strided(size, stride, offset) if count else storage.flat.new_empty(size)


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise Refused("it builds a parameter from something else than a tensor")
    return data


class _Archive:
    """A ``torch.save`` file: an uncompressed zip of one pickle and the storages it refers to.

    Raises:
        OSError, zipfile.BadZipFile: when the file cannot be read as a zip.
        UserError: when it is another kind of file.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise UserError(f"{path} is no torch archive (or of the format before torch 1.6): save it again")
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            with zipfile.ZipFile(file) as archive:
                listed = archive.infolist()
        self.entries = {entry.filename: entry for entry in listed}
        self.intact: set[str] = set()
        roots = [name.removesuffix("/data.pkl") for name in self.entries if name.endswith("/data.pkl")]
        if len(roots) != 1 or len(self.entries) != len(listed):
            raise zipfile.BadZipFile("it does not hold exactly one data.pkl")
        self.root = roots[0]
        order = f"{self.root}/byteorder"
        if order in self.entries and self._read(order).decode("ascii", "replace") != sys.byteorder:
            raise UserError(f"{path} was written on a machine of another byte order: save it again on this kind")
        self.pickle = self._read(f"{self.root}/data.pkl")

    def storage(self, persistent_id: Any) -> _Storage:
        """The storage of a persistent id: ("storage", type, key, location, number of elements)."""
        match persistent_id:
            case ("storage", Global(name=name), str() as key, str(), int() as count) if name in _STORAGE_DTYPES:
                dtype = _STORAGE_DTYPES[name]
            case _:
                raise Refused("it refers to something else than a storage")
        entry = f"{self.root}/data/{key}"
        if entry not in self.entries:
            raise Refused(f"its tensor data {key[:100]!r} is missing")
        try:
            start, stop = self._span(entry)
        except (zipfile.BadZipFile, struct.error) as error:
            raise Refused(str(error)) from None
        if count * dtype.itemsize != stop - start:
            raise Refused(f"its tensor data {key[:100]!r} has another size than its pickle says")
        if count == 0:
            return _Storage(torch.empty(0, dtype=dtype))
        if start % dtype.itemsize:  # torch aligns what it writes; other zip programs do not
            return _Storage(torch.frombuffer(bytearray(self.bytes[start:stop]), dtype=dtype))
        return _Storage(torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=start))

    def _read(self, name: str) -> bytes:
        start, stop = self._span(name)
        return self.bytes[start : min(stop, start + MAX_PICKLE_BYTES + 1)]

    def _span(self, name: str) -> tuple[int, int]:
        """First and last-plus-one byte of an entry in the file, which must be stored as it is, and intact."""
        entry = self.entries[name]
        signature, name_bytes, extra_bytes = struct.unpack_from("<4s22xHH", self.bytes, entry.header_offset)
        start = entry.header_offset + 30 + name_bytes + extra_bytes
        stop = start + entry.file_size
        plain = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
        if signature != b"PK\x03\x04" or not plain or entry.flag_bits & 1 or stop > len(self.bytes):
            raise zipfile.BadZipFile(f"its entry {name[:100]!r} is not stored plainly inside the file")
        # torch can be told to write no check sums: they are 0 then.
        if name not in self.intact and entry.CRC:
            with memoryview(self.bytes) as view, view[start:stop] as part:
                if zlib.crc32(part) != entry.CRC:
                    raise zipfile.BadZipFile(f"its entry {name[:100]!r} fails its check sum")
        self.intact.add(name)
        return start, stop
