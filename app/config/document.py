"""A YAML file with the line of every key, so that a message can say where."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.errors import ConfigError

_ENVIRONMENT_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Document:
    """``tree`` is the content, ``lines`` the line of each key path; both are empty without a file."""

    name: str
    tree: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[tuple[str | int, ...], int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Document:
        """The file, with ``${env:NAME}`` replaced; raises ConfigError."""
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text; save it as UTF-8.") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); name an existing file.") from None
        try:
            root = yaml.compose(text, Loader=yaml.CSafeLoader)
            tree = yaml.load(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}{_yaml_place(error)}: {_yaml_problem(error)}") from None
        except ValueError as error:
            # PyYAML lets Python's own complaint through for a date or number that only looks like one.
            raise ConfigError(f"{path}: a value cannot be read ({str(error)[:200]}); put it in quotes.") from None
        if tree is None:
            return cls(name=str(path))
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{path} must be a mapping of sections (server, models, keys …); see config.example.yaml."
            )
        lines: dict[tuple[str | int, ...], int] = {}
        try:
            _index_lines(root, (), lines, path)
            document = cls(name=str(path), tree=tree, lines=lines)
            return cls(name=document.name, tree=_expand(tree, (), document), lines=lines)
        except RecursionError:
            raise ConfigError(f"{path}: a value contains itself; write it out instead of using an alias (*).") from None

    def place(self, key: Sequence[str | int]) -> str:
        """``file:line: key`` of the nearest place that the file has."""
        path = tuple(key)
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}: {_dotted(path)}"
        return f"{self.name}: {_dotted(path)}"


def _dotted(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _yaml_place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _yaml_problem(error: yaml.YAMLError) -> str:
    problem = str(getattr(error, "problem", None) or "this is not YAML")
    if "escape" in problem or "hexdecimal" in problem:
        return f"{problem}; write Windows paths in single quotes, where a backslash is a backslash."
    return f"{problem}; compare with config.example.yaml."


def _index_lines(node: Any, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines and key.value != "<<":
                raise ConfigError(f"{file}:{key.start_mark.line + 1}: {_dotted(inner)}: this key is given twice.")
            lines[inner] = key.start_mark.line + 1
            _index_lines(value, inner, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _index_lines(value, (*path, index), lines, file)


def _expand(value: Any, path: tuple[str | int, ...], document: Document) -> Any:
    """Replace ``${env:NAME}`` inside every string."""
    if isinstance(value, dict):
        return {str(key): _expand(item, (*path, str(key)), document) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*path, index), document) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ConfigError(
                f"{document.place(path)}: the environment has no variable {name}; set it or write a value."
            )
        return os.environ[name]

    return _ENVIRONMENT_REFERENCE.sub(replace, value)
