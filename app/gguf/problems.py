"""The sentences for files that are no usable model: what it is, why, and the cure."""

from __future__ import annotations

from pathlib import Path

from app.errors import ModelFileError


def damaged(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged: {problem}. Download it again, or convert the model anew.")


def truncated(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{path} is cut off: {problem}. Download it again, or continue the download.")


def short(text: str) -> str:
    """A name out of the file, printable and no longer than a line of an error message should be."""
    return repr(text if len(text) <= 60 else text[:57] + "...")[1:-1]


def describe_other(head: bytes) -> str:
    """What a file is that is no GGUF, from its first bytes, and the cure."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the model itself: run `git lfs pull` in its folder, or download the file."
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        return "is a web page, not a model: the download met a login or an error page, use the direct download link."
    if not head.strip(b"\0"):
        return "begins with zero bytes: the download was interrupted after reserving the space, download it again."
    if head[8:10] == b'{"':
        return "is a safetensors file: convert it with llama.cpp's convert_hf_to_gguf.py, or download a GGUF of it."
    if head[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        return "is in a format older than GGUF: download a GGUF of this model."
    return f"is not a GGUF file (it begins with {head[:4]!r}, not b'GGUF'): name a model in GGUF format."
