"""A model in one file or in several: find its parts and put their heads together."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from app.errors import ModelFileError
from app.gguf.facts import ModelFacts
from app.gguf.header import FileHead, read_file
from app.gguf.problems import damaged

_MAX_SHARDS = 65535  # split.count is 16 bits wide
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def read_header(path: Path, *, arrays: Collection[str] = ()) -> ModelFacts:
    """Read what a model file says about itself; of a split model any shard may be named.

    Arrays of up to 1024 numbers are kept, longer ones and arrays of strings only when ``arrays`` names them.
    Raises ModelFileError, one sentence per kind of wrong file.
    """
    head = read_file(path, arrays)
    files = _shard_paths(path, head)
    if len(files) == 1:
        heads = [head]
    else:
        heads = [head if file.name == path.name else read_file(file, arrays) for file in files]
        _check_shards(files, heads)
    first = heads[0]
    if not isinstance(first.metadata.get("general.architecture"), str):
        raise damaged(files[0], "it does not say which architecture it is (general.architecture)")
    return ModelFacts(
        path=files[0],
        shards=files,
        file_bytes=sum(part.file_bytes for part in heads),
        metadata=first.metadata,
        array_lengths=first.array_lengths,
        tensors=tuple(tensor for part in heads for tensor in part.tensors),
    )


def _shard_paths(path: Path, head: FileHead) -> tuple[Path, ...]:
    """All files of the model that ``path`` belongs to, in order. Raises ModelFileError and names missing ones."""
    count = head.number("split.count")
    if count <= 1:
        return (path,)
    match = _SHARD_NAME.fullmatch(path.name)
    if count > _MAX_SHARDS or match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts but not named so: "
            f"give the parts their names back (NAME-00001-of-{min(count, _MAX_SHARDS):05}.gguf)."
        )
    files = tuple(path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [file.name for file in files if file.name != path.name and not file.exists()]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelFileError(f"{path} is one of {count} parts and these are missing beside it: {names}. Download them.")
    return files


def _check_shards(files: tuple[Path, ...], heads: list[FileHead]) -> None:
    for number, (file, head) in enumerate(zip(files, heads, strict=True)):
        if head.number("split.count") != len(files) or head.number("split.no") != number:
            raise damaged(file, f"it is not part {number + 1} of {len(files)} that its name promises")
    promised = heads[0].number("split.tensors.count")
    names = {tensor.name for head in heads for tensor in head.tensors}
    total = sum(len(head.tensors) for head in heads)
    if len(names) != total or promised not in (0, total):
        raise damaged(files[0], f"its parts hold {len(names)} tensors, not {promised or total}")
