"""Every line of the checklist, and every row of the reports about the surface, has a test that bears its number."""

from __future__ import annotations

import re
from pathlib import Path

_LINES = range(1, 118)
_ROWS = {1, 4, 7, 8, 10, 11, 12, 13, 14, 18, 28, 29, 32, 35, 36, 37, 38, 39, 40, 41, 51, 53, 55, 56, 57}


def _numbers(marker: str) -> set[int]:
    texts = (file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    found = (match for text in texts for match in re.findall(rf"^@{marker}\(([\d, ]+)\)$", text, re.MULTILINE))
    return {int(number) for match in found for number in match.split(",")}


def test_every_line_has_its_test() -> None:
    assert _numbers("lines") == set(_LINES)


def test_every_row_about_the_surface_has_its_test() -> None:
    assert set() == _ROWS - _numbers("rows")
