"""Every configuration of the published table keeps what is promised of the ledger."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.engine.binary import find_engine
from tests.bench.memory import measure
from tests.bench.memory_cases import cases


@pytest.mark.slow
def test_the_table_of_the_documentation(native_engine: Path | None, tmp_path: Path) -> None:
    if native_engine is None or shutil.which("gcc") is None:
        pytest.skip("needs the native engine and gcc")
    rows = list(measure(find_engine(str(native_engine)), list(cases()), tmp_path))
    assert len(rows) >= 40
    assert [row.text() for row in rows if not row.is_kept] == []
