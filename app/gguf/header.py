"""The head of one GGUF file: metadata and tensor table. Format: ggml's docs/gguf.md."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from math import prod
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from app.errors import ModelFileError
from app.gguf.cursor import U32, U64, Cursor
from app.gguf.facts import Scalar, TensorInfo, Value
from app.gguf.problems import damaged, describe_other, short, truncated
from app.gguf.types import TENSOR_TYPES

_MAX_NAME_BYTES = 65535
_MAX_KEYS = 65536
_MAX_TENSORS = 131072
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_ELEMENTS = 1 << 50
_KEPT_ENTRIES = 1024
_VERSIONS = (2, 3)

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Mapping[int, Struct] = {
    number: Struct("<" + code)
    for number, code in ((0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"), (7, "?"))
} | {number: Struct("<" + code) for number, code in ((10, "Q"), (11, "q"), (12, "d"))}


class FileHead(NamedTuple):
    file_bytes: int
    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: list[TensorInfo]

    def number(self, key: str) -> int:
        value = self.metadata.get(key)
        return value if isinstance(value, int) else 0


def read_file(path: Path, arrays: Collection[str]) -> FileHead:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path} is a folder: name the .gguf file in it.")
        # A pipe would block for ever.
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file: name a .gguf file on a disk.")
        with path.open("rb", buffering=0) as file:
            return _parse(Cursor(file, path, os.fstat(file.fileno()).st_size), arrays)
    except FileNotFoundError as error:
        raise ModelFileError(f"There is no file {path}: check the path, or download the model first.") from error
    except PermissionError as error:
        raise ModelFileError(
            f"{path} may not be read by this user: give it read permission (chmod a+r), also to its folders."
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error}): check the path and the disk.") from error


def _parse(cursor: Cursor, arrays: Collection[str]) -> FileHead:
    _check_magic(cursor)
    tensor_count = cursor.count("tensors", _MAX_TENSORS)
    key_count = cursor.count("metadata keys", _MAX_KEYS)
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(key_count):
        key = cursor.text("the name of a key", _MAX_NAME_BYTES)
        if key in metadata or key in lengths:
            raise damaged(cursor.path, f"its key {short(key)} occurs twice")
        kind = cursor.number(U32)
        if kind != _ARRAY:
            metadata[key] = _scalar(cursor, key, kind)
            continue
        kind, lengths[key] = cursor.number(U32), cursor.count(f"entries of {short(key)}", cursor.size)
        values = _array(cursor, key, kind, lengths[key], wanted=key in arrays)
        if values is not None:
            metadata[key] = values
    tensors = [_tensor(cursor) for _ in range(tensor_count)]
    _check_tensors(cursor, tensors, _alignment(cursor.path, metadata))
    return FileHead(cursor.size, metadata, lengths, tensors)


def _check_magic(cursor: Cursor) -> None:
    path, head = cursor.path, cursor.peek(512)
    if not head:
        raise ModelFileError(f"{path} is empty: the download did not start or the disk was full, download it again.")
    if head[:4] != b"GGUF":
        raise ModelFileError(f"{path} {describe_other(head)}")
    cursor.skip(4)
    version = cursor.number(U32)
    if version == 1:
        raise ModelFileError(f"{path} is GGUF version 1, which no current engine reads: convert the model anew.")
    if version & 0xFFFF == 0 and version:
        raise ModelFileError(f"{path} was written for big-endian machines: take the little-endian file of this model.")
    if version not in _VERSIONS:
        raise ModelFileError(f"{path} has GGUF version {version}, known are 2 and 3: update llama-gateway.")


def _scalar(cursor: Cursor, key: str, kind: int) -> Scalar:
    if kind == _STRING:
        return cursor.text(short(key))
    return cursor.number(_number_kind(cursor, key, kind))


def _array(cursor: Cursor, key: str, kind: int, count: int, *, wanted: bool) -> tuple[Scalar, ...] | None:
    """The entries, or None for an array that was only skipped."""
    if kind == _STRING:
        if wanted:
            return cursor.texts(f"an entry of {short(key)}", count)
        cursor.skip_texts(count)
        return None
    number = _number_kind(cursor, key, kind)
    if wanted or count <= _KEPT_ENTRIES:
        return cursor.numbers(number, count)
    cursor.skip(count * number.size)
    return None


def _number_kind(cursor: Cursor, key: str, kind: int) -> Struct:
    number = _NUMBERS.get(kind)
    if number is None:
        raise damaged(cursor.path, f"its key {short(key)} has the unknown value type {kind}")
    return number


def _tensor(cursor: Cursor) -> TensorInfo:
    name = cursor.text("the name of a tensor", _MAX_NAME_BYTES)
    dimensions = cursor.number(U32)
    if dimensions > _MAX_DIMENSIONS:
        raise damaged(cursor.path, f"its tensor {short(name)} claims {dimensions} dimensions")
    shape = tuple(cursor.number(U64) for _ in range(dimensions))
    kind, offset = cursor.number(U32), cursor.number(U64)
    known = TENSOR_TYPES.get(kind)
    if known is None:
        raise ModelFileError(
            f"{cursor.path} has a tensor {short(name)} of type {kind}, which is not known here: "
            "update llama-gateway, or take another quantisation of this model."
        )
    elements, row = prod(shape), shape[0] if shape else 1
    if not 0 < elements <= _MAX_ELEMENTS or row % known.block:
        raise damaged(cursor.path, f"its tensor {short(name)} has the impossible shape {list(shape)} for {known.name}")
    return TensorInfo(name, shape, kind, offset, elements // known.block * known.size)


def _check_tensors(cursor: Cursor, tensors: list[TensorInfo], alignment: int) -> None:
    """Every tensor lies in the file and on no other one."""
    path = cursor.path
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise damaged(path, "it has two tensors of one name")
    data_bytes = cursor.size - (cursor.position + -cursor.position % alignment)
    end = 0
    for tensor in sorted(tensors, key=attrgetter("offset")):
        if tensor.offset % alignment:
            raise damaged(path, f"its tensor {short(tensor.name)} does not lie on a multiple of {alignment} bytes")
        if tensor.offset < end:
            raise damaged(path, f"its tensor {short(tensor.name)} overlaps another one")
        end = tensor.offset + tensor.size_bytes
    if end > data_bytes:
        raise truncated(path, f"{end - max(data_bytes, 0)} bytes are missing at its end")


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise damaged(path, f"its key general.alignment is {short(str(value))}, not a power of two")
    return value
