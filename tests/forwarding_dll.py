"""A Windows library of nothing but names that lead to functions of others (PE/COFF: export forwarding)."""

from __future__ import annotations

import struct
from collections.abc import Mapping

_SECTION_ADDRESS = 0x1000
_FILE_ALIGNMENT = 0x200
_X64, _EXECUTABLE_LIBRARY = 0x8664, 0x2022
_READ_ONLY_DATA = 0x40000040


def forwarding_dll(name: str, exports: Mapping[str, str]) -> bytes:
    """The file ``name``; ``exports`` maps each function to ``library.function``."""
    data = _export_table(name, exports)
    raw_bytes = -(-len(data) // _FILE_ALIGNMENT) * _FILE_ALIGNMENT
    dos = b"MZ".ljust(60, b"\0") + struct.pack("<I", 64)
    coff = struct.pack("<4sHHIIIHH", b"PE\0\0", _X64, 1, 0, 0, 0, 240, _EXECUTABLE_LIBRARY)
    head = dos + coff + _optional_header(raw_bytes) + _directories(len(data)) + _section(len(data), raw_bytes)
    return head.ljust(_FILE_ALIGNMENT, b"\0") + data.ljust(raw_bytes, b"\0")


def _export_table(name: str, exports: Mapping[str, str]) -> bytes:
    names = sorted(exports)
    count = len(names)
    tables = 40 + 10 * count
    texts, addresses = b"", []
    for text in (name, *names, *(exports[each] for each in names)):
        addresses.append(_SECTION_ADDRESS + tables + len(texts))
        texts += text.encode() + b"\0"
    functions, pointers = addresses[1 + count :], addresses[1 : 1 + count]
    at = [_SECTION_ADDRESS + 40 + offset * count for offset in (0, 4, 8)]
    directory = struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, addresses[0], 1, count, count, *at)
    return directory + struct.pack(f"<{2 * count}I{count}H", *functions, *pointers, *range(count)) + texts


def _optional_header(raw_bytes: int) -> bytes:
    """PE32+ without code; Windows 6.0 or later, two pages in memory."""
    standard = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, raw_bytes, 0, 0, _SECTION_ADDRESS)
    sizes = (0x2000, _FILE_ALIGNMENT, 0, 3, 0x100, 0x100000, 0x1000, 0x100000, 0x1000, 0, 16)
    windows = struct.pack("<QIIHHHHHHIIIIHHQQQQII", 0x180000000, 0x1000, 0x200, 6, 0, 0, 0, 6, 0, 0, *sizes)
    return standard + windows


def _directories(data_bytes: int) -> bytes:
    """Sixteen of them, of which the first is the export table."""
    return struct.pack("<II", _SECTION_ADDRESS, data_bytes).ljust(16 * 8, b"\0")


def _section(data_bytes: int, raw_bytes: int) -> bytes:
    place = (data_bytes, _SECTION_ADDRESS, raw_bytes, _FILE_ALIGNMENT, 0, 0, 0, 0)
    return struct.pack("<8sIIIIIIHHI", b".rdata", *place, _READ_ONLY_DATA)
