"""Private files: opened without following links, locked, and synchronized to the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO

from zeus_plugins import environment

# Errors of flock for a lock that another process holds; other errors are the file system's.
_LOCKED_BY_ANOTHER = frozenset({errno.EWOULDBLOCK, errno.EAGAIN})

# Without O_NONBLOCK, opening a FIFO would wait for its other end.
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK


class FileBusyError(Exception):
    """Another process holds the lock."""


class ForeignFileError(Exception):
    """The path is not a regular file of this user."""


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return ``ZEUS_STATE_DIR``, or ``zeus-plugins`` in the platform's directory for application state."""
    stated = environment.STATE_DIRECTORY.text(environ)
    if stated:
        return Path(stated)
    try:
        home = Path.home()
    except RuntimeError:  # a container's user without a name and a HOME: use the directory for temporary files
        home = Path(tempfile.gettempdir())
        return Path(environment.XDG_STATE_HOME.text(environ) or home / f"user-{os.geteuid()}") / "zeus-plugins"
    if sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(environment.XDG_STATE_HOME.text(environ) or home / ".local" / "state")
    return base / "zeus-plugins"


def make_private(directory: Path) -> None:
    """Create a directory that only this user can enter; raise `PermissionError` if it is another user's."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    for there in (directory.lstat(), directory.stat()):
        if there.st_uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, "it belongs to another user: set ZEUS_STATE_DIR to a directory of your own", str(directory)
            )
    if stat.S_IMODE(there.st_mode) & 0o077:
        directory.chmod(0o700)


def open_own(path: Path, *, create: bool = False) -> IO[bytes]:
    """Open a regular file of this user for reading and writing, or create it (`FileExistsError` if it exists)."""
    # Check before opening, as opening a device can have an effect, and again after it, as the file may have changed.
    if not create and not stat.S_ISREG(path.lstat().st_mode):
        raise ForeignFileError(f"{path} is not a regular file")
    descriptor = os.open(path, os.O_RDWR | _CAREFUL | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    opened = os.fstat(descriptor)
    if not (stat.S_ISREG(opened.st_mode) and opened.st_uid == os.geteuid()):
        os.close(descriptor)
        raise ForeignFileError(f"{path} is not a regular file of this user")
    return os.fdopen(descriptor, "r+b", buffering=0)


def open_locked(path: Path, *, create: bool = False) -> IO[bytes]:
    """Open and lock a file of this user; raise `FileBusyError` if another process holds or has just created it."""
    while True:
        try:
            file = open_own(path, create=create)
        except FileExistsError as error:
            raise FileBusyError(f"another process has made {path}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in _LOCKED_BY_ANOTHER:
                raise FileBusyError(f"another process has {path}") from error
            if create:
                path.unlink(missing_ok=True)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                return file
        # Another process removed the file between opening and locking.
        close(file)


def close(file: IO[bytes]) -> None:
    """Unlock and close a file: without the unlock, forked children would keep the lock."""
    fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a file to a free name with this suffix, and return the new path."""
    aside = path.with_suffix(suffix)
    for copy in count(1):
        if not os.path.lexists(aside):
            break
        aside = path.with_name(f"{path.stem}-{copy}{suffix}")
    os.replace(path, aside)
    return aside


def sync_directory(directory: Path) -> None:
    """Put the names of a directory's files on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
