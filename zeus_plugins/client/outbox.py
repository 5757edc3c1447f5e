"""Results that the server has not taken yet, on disk: one file per trial, as JSON lines.

The first line of a file says which trial it is, the others what is to be delivered, in order, and what of it was. A
line is on the disk before the training goes on. A file exists as long as something in it waits, and whoever writes it
or delivers from it holds its lock: the training while it runs, otherwise the next run of any job on that server, or
``zeus-plugins sync``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from zeus_plugins.protocol import Ending, Evaluation, JobRegistration, PowerLimitChoice, TrialId, WireMessage
from zeus_plugins.training import environment

__all__ = [
    "Item",
    "Outbox",
    "OutboxFile",
    "OutboxFileBusyError",
    "OutboxFileError",
    "OutboxHeader",
    "default_outbox",
    "state_directory",
]


_SUFFIX = ".jsonl"
_REFUSED_SUFFIX = ".refused"
_NAME_LENGTH = 80

# What flock and Windows say of a lock that another process has; any other error is the file system's.
_LOCKED_BY_ANOTHER = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK})


Item = Evaluation | Ending | PowerLimitChoice
"""What can wait: where a trial stood, how it ended, and what it found out of its power limits."""


class OutboxFileError(Exception):
    """A file of the outbox cannot be read as one."""


class OutboxFileBusyError(Exception):
    """Another process writes the file or delivers from it."""


class OutboxHeader(WireMessage):
    """Whose results a file holds: its first line.

    Attributes:
        format: Says what this is.
        version: Version of the format.
        server_url: Where the results belong.
        registration: The job on its hardware, with its `job_id`.
        batch_size: The trial's global batch size.
        trial: The trial, or None for one that began while the server was away.
        key: By which such a trial is recorded, once; None for any other.
    """

    format: Literal["zeus-outbox"] = "zeus-outbox"
    version: Literal[1] = 1
    server_url: str
    registration: JobRegistration
    batch_size: int
    trial: TrialId | None = None
    key: str | None = None

    def file_name(self, copy: int = 0) -> str:
        """The same for the same trial of the same server and the same `copy`, and fit for every file system."""
        job_id = self.registration.job_id or ""
        which = self.key if self.key is not None else (self.trial.trial_number if self.trial else None)
        digest = hashlib.sha256(json.dumps([self.server_url, job_id, which]).encode()).hexdigest()[:16]
        readable = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in job_id[:_NAME_LENGTH])
        return f"{readable}-{digest}{f'-{copy}' if copy else ''}{_SUFFIX}"


class _Line(WireMessage):
    """A line after the first: exactly one of its fields.

    Attributes:
        delivered: The number of items that were delivered so far, in all.
        trial: The trial as the server has recorded it.
    """

    evaluation: Evaluation | None = None
    ending: Ending | None = None
    power_limits: PowerLimitChoice | None = None
    delivered: int | None = None
    trial: TrialId | None = None


class OutboxFile:
    """One open and locked file of the outbox; not for several threads at once. `Outbox` opens it.

    Args:
        path: The file.
        file: The same, open, locked and unbuffered. None: there is none, and what is put in is kept in memory alone.
        sender: Whose results these are.

    Attributes:
        trial: The trial, or None while the server has not recorded it.
        latest: The last evaluation that was put in, delivered or not.
    """

    def __init__(self, path: Path, file: IO[bytes] | None, sender: OutboxHeader) -> None:
        self.path = path
        self._file = file
        self.sender = sender
        self.trial = sender.trial
        # Each with whether it is on the disk: what is delivered of the file is counted by its lines.
        self._waiting: deque[tuple[Item, bool]] = deque()
        self._delivered = 0
        self.latest: Evaluation | None = None

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a file, open, and not only this process's memory."""
        return self._file is not None

    @property
    def first(self) -> Item | None:
        """The next item to deliver, or None."""
        return self._waiting[0][0] if self._waiting else None

    @property
    def has_ending(self) -> bool:
        """Whether the last thing to be delivered, but for power limits, is how the training ended."""
        others = (item for item, _ in reversed(self._waiting) if not isinstance(item, PowerLimitChoice))
        return isinstance(next(others, None), Ending)

    def __len__(self) -> int:
        """The number of items to deliver."""
        return len(self._waiting)

    def put(self, item: Item) -> None:
        """Add something to be delivered; it is on the disk when this returns.

        Raises:
            OSError: The disk does not take it. It is still delivered if this process lives long enough.
        """
        self._take_in(item, is_on_disk=False)
        if self._write(_line_of(item)):
            self._waiting[-1] = item, True

    def name(self, trial: TrialId) -> None:
        """Note under which name the server has recorded the trial."""
        self.trial = trial
        # Without the note it is recorded again, under the same key and so as the same trial.
        with contextlib.suppress(OSError):
            self._write(_Line(trial=trial))

    def drop_first(self) -> None:
        """Note that the first item was delivered."""
        _, is_on_disk = self._waiting.popleft()
        if not is_on_disk:
            return
        self._delivered += 1
        # Without the note it is delivered again, which the server bears.
        with contextlib.suppress(OSError):
            self._write(_Line(delivered=self._delivered))

    def drop_all(self) -> None:
        """Note that nothing more is to be delivered but power limits, which a trial that has ended may have left."""
        kept = [item for item, _ in self._waiting if isinstance(item, PowerLimitChoice)]
        while self._waiting:
            self.drop_first()
        for item in kept:
            # Those are delivered as long as this process lives, even if the disk does not take them again.
            with contextlib.suppress(OSError):
                self.put(item)

    def refuse(self) -> Path | None:
        """Set the file aside, because the server does not want it; where it is now, or None if that was impossible."""
        aside: Path | None = None
        if self._file is not None:
            # Somebody may have removed it, or taken the right to its directory.
            with contextlib.suppress(OSError):
                aside = _set_aside(self.path)
        self._waiting.clear()
        self._release()
        return aside

    def close(self) -> None:
        """Let others have the file. It is removed if nothing in it waits."""
        if self._file is not None and not self._waiting:
            # What stays is found to be delivered already.
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._release()

    def _write(self, line: WireMessage) -> bool:
        """Whether the line is on the disk: there may be no file."""
        if self._file is None:
            return False
        end = self._file.seek(0, os.SEEK_END)
        # Of a line's fields one is given. A field that is None for a reason, such as the job's beta_knob, stays so.
        data = line.model_dump_json(exclude_unset=isinstance(line, _Line)).encode() + b"\n"
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._file.fileno())
        except OSError:
            # Half a line would spoil the next one.
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise
        return True

    def _take_in(self, item: Item, *, is_on_disk: bool) -> None:
        self._waiting.append((item, is_on_disk))
        if isinstance(item, Evaluation):
            self.latest = item

    def _read(self, lines: list[bytes]) -> None:
        for text in lines:
            line = _Line.model_validate_json(text)
            item = line.evaluation or line.ending or line.power_limits
            if item is not None:
                self._take_in(item, is_on_disk=True)
            elif line.trial is not None:
                self.trial = line.trial
            while line.delivered is not None and self._delivered < line.delivered and self._waiting:
                self._waiting.popleft()
                self._delivered += 1

    def _release(self) -> None:
        if self._file is not None:
            _close(self._file)
            self._file = None


def _line_of(item: Item) -> _Line:
    match item:
        case Evaluation():
            return _Line(evaluation=item)
        case Ending():
            return _Line(ending=item)
        case PowerLimitChoice():
            return _Line(power_limits=item)


class Outbox:
    """A directory of results that wait.

    Args:
        directory: Made when the first result is put into it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def waiting(self) -> list[Path]:
        """Files with results that wait, oldest first."""
        return sorted(self.directory.glob(f"*{_SUFFIX}"), key=_age)

    def refused(self) -> list[Path]:
        """Files that a server did not want, oldest first."""
        return sorted(self.directory.glob(f"*{_REFUSED_SUFFIX}"), key=_age)

    def box(self, sender: OutboxHeader) -> OutboxFile:
        """The trial's file, as an earlier run has left it, or a new one.

        Raises:
            OSError: The disk does not take it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for copy in count():
            path = self.directory / sender.file_name(copy)
            # An earlier run's may be just being delivered.
            with contextlib.suppress(OutboxFileBusyError):
                return self._opened(path, sender)
        raise AssertionError("unreachable: some name is free")

    def latest(self, sender: OutboxHeader) -> Evaluation | None:
        """The trial's last evaluation that an earlier run has left, or None."""
        try:
            box = self.open(self.directory / sender.file_name())
        except (OutboxFileBusyError, OutboxFileError, OSError):
            return None
        latest = box.latest
        box.close()
        return latest

    def _opened(self, path: Path, sender: OutboxHeader) -> OutboxFile:
        try:
            return self.open(path)
        except FileNotFoundError:
            pass
        except OutboxFileError:
            _set_aside(path)
        box = OutboxFile(path, _locked(path, create=True), sender)
        try:
            box._write(sender)
            _sync_directory(self.directory)
        except OSError:
            box.close()
            raise
        return box

    def open(self, path: Path) -> OutboxFile:
        """Open one of the files that wait.

        Raises:
            OutboxFileBusyError: Another process has it.
            OutboxFileError: It is none, or from another version.
            FileNotFoundError: Its last result was delivered meanwhile.
        """
        file = _locked(path)
        try:
            text = file.read()
            # The last line of a process that died while it wrote.
            whole = text[: text.rfind(b"\n") + 1]
            file.truncate(len(whole))
            first, *lines = whole.splitlines() or [b""]
            box = OutboxFile(path, file, OutboxHeader.model_validate_json(first))
            box._read(lines)
        except ValidationError as error:
            _close(file)
            raise OutboxFileError(f"{path} is no file of results that wait for a server: {error}") from None
        except OSError:
            _close(file)
            raise
        return box


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's results wait: ``ZEUS_STATE_DIR``, else ``zeus-plugins`` in the platform's place for state.

    Args:
        environ: Environment variables; those of the process by default.
    """
    stated = environment.STATE_DIRECTORY.text(environ)
    if stated:
        return Path(stated)
    try:
        home = Path.home()
    except RuntimeError:  # A container's user without a name or a HOME.
        home = Path(tempfile.gettempdir())
    if sys.platform == "win32":
        base = Path(environment.LOCALAPPDATA.text(environ) or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(environment.XDG_STATE_HOME.text(environ) or home / ".local" / "state")
    return base / "zeus-plugins"


def default_outbox(environ: Mapping[str, str] | None = None) -> Outbox:
    """The outbox in `state_directory`."""
    return Outbox(state_directory(environ) / "outbox")


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # Removed meanwhile, or out of reach; opening it tells.
        return 0.0, path.name


def _set_aside(path: Path) -> Path:
    """Rename a file that is not to be delivered; what was set aside before under its name stays."""
    aside = path.with_suffix(_REFUSED_SUFFIX)
    for copy in count(1):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.stem}-{copy}{_REFUSED_SUFFIX}")
    os.replace(path, aside)
    return aside


def _locked(path: Path, *, create: bool = False) -> IO[bytes]:
    """Open and lock a file that is still the one of this name once it is locked.

    Raises:
        OutboxFileBusyError: Another process has the lock, or has made the file that was to be created.
        FileNotFoundError: There is no such file, and none is to be created.
        OSError: The file cannot be used, or this file system knows no locks.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        except FileExistsError as error:
            raise OutboxFileBusyError(f"another process has made {path}") from error
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            _lock(file)
        except OSError as error:
            file.close()
            if error.errno in _LOCKED_BY_ANOTHER:
                raise OutboxFileBusyError(f"another process has {path}") from error
            if create:
                path.unlink(missing_ok=True)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        # It was removed between opening and locking.
        _close(file)


def _close(file: IO[bytes]) -> None:
    # Closing alone would leave the lock to children that were forked meanwhile.
    _unlock(file)
    file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

    def _sync_directory(directory: Path) -> None:
        """Windows has no such thing."""

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    def _sync_directory(directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
