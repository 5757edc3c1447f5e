"""Full, read-only and removed disks, and SQLite files with a damaged page."""

from __future__ import annotations

import errno
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size: str) -> Iterator[Path]:
    """Mount a file system of this size in memory; skip the test without the permission to mount."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],  # noqa: S607 - wherever the program is
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # noqa: S607 - wherever the program is


def fill(disk: Path) -> Path:
    """Fill a disk completely; return the file that occupies the space."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for block in (65536, 4096, 512, 1):
            try:
                while True:
                    file.write(b"x" * block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return ballast


def damage_page(file: Path, name: str) -> None:
    """Overwrite the first page of a table or an index in a SQLite file that no process has open."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    with file.open("r+b") as opened:
        opened.seek((page - 1) * size)
        opened.write(b"\xff" * size)
