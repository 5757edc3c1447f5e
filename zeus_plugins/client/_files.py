"""Files that this user alone writes: opened without following anything planted, locked, and put on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from itertools import count
from pathlib import Path
from typing import IO

# What flock and Windows say of a lock that another process has; any other error is the file system's.
_LOCKED_BY_ANOTHER = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK})

# Opening a FIFO would wait for its other end. Windows has neither.
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileBusyError(Exception):
    """Another process has the lock."""


class ForeignFileError(Exception):
    """There is something else than a regular file of this user."""


def make_private(directory: Path) -> None:
    """Make a directory that only this user enters, or have it so.

    Raises:
        PermissionError: It is another user's, or a link that another user has put there.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if sys.platform == "win32":
        return
    for there in (directory.lstat(), directory.stat()):
        if there.st_uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, "it belongs to another user: set ZEUS_STATE_DIR to a directory of your own", str(directory)
            )
    if stat.S_IMODE(there.st_mode) & 0o077:
        directory.chmod(0o700)


def open_own(path: Path) -> IO[bytes]:
    """Open a regular file of this user for reading and writing; whatever else there is stays as it is.

    Raises:
        ForeignFileError: There is something else.
    """
    return os.fdopen(_checked(path, os.open(path, _flags(path), 0o600)), "r+b", buffering=0)


def open_locked(path: Path, *, create: bool = False) -> IO[bytes]:
    """Open and lock a file that is still the one of this name once it is locked.

    Raises:
        FileBusyError: Another process has the lock, or has made the file that was to be created.
        ForeignFileError: There is something else than a regular file of this user.
    """
    while True:
        try:
            file = _created(path) if create else open_own(path)
        except FileExistsError as error:
            raise FileBusyError(f"another process has made {path}") from error
        try:
            _lock(file)
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
        # It was removed between opening and locking.
        close(file)


def close(file: IO[bytes]) -> None:
    """Unlock and close; closing alone would leave the lock to children that were forked meanwhile."""
    _unlock(file)
    file.close()


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a file that is not to be delivered; what was set aside before under its name stays."""
    aside = path.with_suffix(suffix)
    for copy in count(1):
        if not os.path.lexists(aside):
            break
        aside = path.with_name(f"{path.stem}-{copy}{suffix}")
    os.replace(path, aside)
    return aside


def _created(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CAREFUL, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _flags(path: Path) -> int:
    # Opening a device or a tape can do something by itself.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ForeignFileError(f"{path} is not a regular file")
    return os.O_RDWR | _CAREFUL


def _checked(path: Path, descriptor: int) -> int:
    opened = os.fstat(descriptor)
    is_own = sys.platform == "win32" or opened.st_uid == os.geteuid()
    if stat.S_ISREG(opened.st_mode) and is_own:
        return descriptor
    os.close(descriptor)
    raise ForeignFileError(f"{path} is not a regular file of this user")


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

    def sync_directory(directory: Path) -> None:
        """Windows has no such thing."""

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    def sync_directory(directory: Path) -> None:
        """Put the names of a directory's files on the disk."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
