"""Files that this user alone writes: opened without following planted links, locked, and put on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO

from zeus_plugins import environment

# What flock and Windows say of a lock that another process has; any other error is the file system's.
_LOCKED_BY_ANOTHER = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK})

# Opening a FIFO would wait for its other end. Windows has neither.
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileBusyError(Exception):
    """Another process has the lock."""


class ForeignFileError(Exception):
    """There is something else than a regular file of this user."""


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return ``ZEUS_STATE_DIR``, or else ``zeus-plugins`` in the platform's directory for state."""
    stated = environment.STATE_DIRECTORY.text(environ)
    if stated:
        return Path(stated)
    try:
        home = Path.home()
    except RuntimeError:  # A container's user without a name or a HOME shares the directory for temporary files.
        home = Path(tempfile.gettempdir())
        if sys.platform != "win32":
            return Path(environment.XDG_STATE_HOME.text(environ) or home / f"user-{os.geteuid()}") / "zeus-plugins"
    if sys.platform == "win32":
        base = Path(environment.LOCALAPPDATA.text(environ) or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(environment.XDG_STATE_HOME.text(environ) or home / ".local" / "state")
    return base / "zeus-plugins"


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


def open_own(path: Path, *, create: bool = False) -> IO[bytes]:
    """Open a regular file of this user for reading and writing, or create it; anything else there stays as it is.

    Raises:
        ForeignFileError: There is something else.
        FileExistsError: The file that was to be created is there.
    """
    # Opening a device can already have an effect: the kind of the file is checked before, and again afterwards.
    if not create and not stat.S_ISREG(path.lstat().st_mode):
        raise ForeignFileError(f"{path} is not a regular file")
    descriptor = os.open(path, os.O_RDWR | _CAREFUL | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    opened = os.fstat(descriptor)
    is_own = sys.platform == "win32" or opened.st_uid == os.geteuid()
    if not (stat.S_ISREG(opened.st_mode) and is_own):
        os.close(descriptor)
        raise ForeignFileError(f"{path} is not a regular file of this user")
    return os.fdopen(descriptor, "r+b", buffering=0)


def open_locked(path: Path, *, create: bool = False) -> IO[bytes]:
    """Open and lock a file that is still the one of this name once it is locked.

    Raises:
        FileBusyError: Another process has the lock, or has made the file that was to be created.
        ForeignFileError: There is something else than a regular file of this user.
    """
    while True:
        try:
            file = open_own(path, create=create)
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
        # Another process has removed the file between opening and locking.
        close(file)


def close(file: IO[bytes]) -> None:
    """Unlock and close; closing alone would leave the lock to children that were forked meanwhile."""
    _unlock(file)
    file.close()


def set_aside(path: Path, suffix: str) -> Path:
    """Rename a file that is not to be delivered; files that were set aside before under its name stay."""
    aside = path.with_suffix(suffix)
    for copy in count(1):
        if not os.path.lexists(aside):
            break
        aside = path.with_name(f"{path.stem}-{copy}{suffix}")
    os.replace(path, aside)
    return aside


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
