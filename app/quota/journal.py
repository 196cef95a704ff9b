"""The quota file: every bucket's content in SQLite, written by one thread, whole at any moment."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.errors import StorageError
from app.quota.clock import ClockMark
from app.quota.ledger import Row
from app.quota.limits import Window

_log = logging.getLogger(__name__)

_VERSION = 1
_BUSY_SECONDS = 0.5
_SYNC_SECONDS = 1.0
_FORGET_EVERY_SECONDS = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS used (
    key TEXT NOT NULL, window TEXT NOT NULL, bucket INTEGER NOT NULL, amount INTEGER NOT NULL CHECK (amount >= 0),
    PRIMARY KEY (key, window, bucket)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), now REAL, steady REAL, boot TEXT);
"""


class JournalError(Exception):
    """The file cannot be written now."""


class JournalReplaced(JournalError):
    """The file was damaged and has been replaced by an empty one."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the file held: contents of buckets, and the clock of who wrote them."""

    rows: Mapping[Row, int] = field(default_factory=dict)
    mark: ClockMark | None = None


class Journal:
    """All methods are called on one and the same thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._synced_at = self._forgot_at = time.monotonic()
        self.is_synced = True

    def open(self) -> Kept:
        """Read the file, or begin a new one; a damaged one is moved aside. Raises StorageError."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                return self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
                    raise
                self._move_aside(error)
                return self._open()
        except sqlite3.OperationalError as error:
            raise StorageError(_unusable(self._path, error)) from None
        except OSError as error:
            raise StorageError(
                f"The quota file {self._path} cannot be used ({error.strerror}); set quota.store to a writable place."
            ) from None

    def write(self, rows: Mapping[Row, int], mark: ClockMark) -> None:
        """Commit the contents of buckets; raises JournalError, and then nothing of it is written.

        JournalReplaced says that the file was damaged and is a new, empty one now: write everything.
        """
        try:
            self._commit(rows, mark)
            if time.monotonic() - self._synced_at >= _SYNC_SECONDS:
                self.sync()
        except (sqlite3.Error, OSError) as error:
            if not isinstance(error, sqlite3.Error) or not _is_damage(error):
                raise JournalError(str(error)) from error
            self._replace(error)
            raise JournalReplaced(str(error)) from error

    def sync(self) -> None:
        """Carry it to the disk: a commit alone survives our end, but not that of the machine; raises JournalError."""
        try:
            if self._connection is not None:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            raise JournalError(str(error)) from error
        self._synced_at, self.is_synced = time.monotonic(), True

    def close(self) -> None:
        """Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> Kept:
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            # One gateway per file: two would not know of each other's reservations.
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            _check(connection)
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
            kept = _read(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return kept

    def _commit(self, rows: Mapping[Row, int], mark: ClockMark) -> None:
        connection = self._connection
        if connection is None:
            raise JournalError("the file is closed")
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(
                "INSERT OR REPLACE INTO used VALUES (?, ?, ?, ?)", [(*row, amount) for row, amount in rows.items()]
            )
            connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?)", (mark.now, mark.steady, mark.boot))
            self._forget(connection, mark.now)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.is_synced = False

    def _forget(self, connection: sqlite3.Connection, now: float) -> None:
        """Remove what counts no more."""
        if time.monotonic() - self._forgot_at < _FORGET_EVERY_SECONDS:
            return
        self._forgot_at = time.monotonic()
        for window in Window:
            oldest = window.bucket(now) - window.buckets
            connection.execute("DELETE FROM used WHERE window = ? AND bucket <= ?", (window.label, oldest))

    def _replace(self, error: sqlite3.Error) -> None:
        try:
            self._move_aside(error)
            self._open()
        except (sqlite3.Error, OSError) as second:
            raise JournalError(str(second)) from second

    def _move_aside(self, error: sqlite3.Error) -> None:
        self.close()
        aside = self._path.with_name(
            f"{self._path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6}"
        )
        for suffix in ("", "-wal", "-shm"):
            part = self._path.with_name(self._path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
        _log.error(
            "the quota file %s is damaged (%s): moved to %s, budgets begin anew in a new file", self._path, error, aside
        )


def _check(connection: sqlite3.Connection) -> None:
    found = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found is None or found[0] != "ok":
        raise sqlite3.DatabaseError(f"malformed: {found[0] if found else 'no answer'}")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"malformed: version {version}, known is {_VERSION}")


def _read(connection: sqlite3.Connection) -> Kept:
    rows: dict[Row, int] = {}
    for key, window, bucket, amount in connection.execute("SELECT key, window, bucket, amount FROM used"):
        if not isinstance(key, str) or not isinstance(bucket, int) or not isinstance(amount, int) or amount < 0:
            raise sqlite3.DatabaseError("malformed: a row is no amount")
        rows[key, str(window), bucket] = amount
    clock = connection.execute("SELECT now, steady, boot FROM clock").fetchone()
    return Kept(rows, ClockMark(float(clock[0]), float(clock[1]), str(clock[2])) if clock else None)


def _is_damage(error: sqlite3.Error) -> bool:
    text = str(error)
    return any(
        mark in text for mark in ("malformed", "not a database", "no such table", "no such column", "file is encrypted")
    )


def _unusable(path: Path, error: sqlite3.Error) -> str:
    if "locked" in str(error):
        return f"The quota file {path} is in use by another gateway; give each its own, or share a redis:// store."
    return f"The quota file {path} cannot be used ({error}); set quota.store to a writable place."
