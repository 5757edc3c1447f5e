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
import re
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from zeus_plugins.client import _files
from zeus_plugins.protocol import (
    Ending,
    Evaluation,
    JobRegistration,
    PowerLimitChoice,
    TrialId,
    TrialState,
    WireMessage,
)
from zeus_plugins.training import environment

_SUFFIX = ".jsonl"
_REFUSED_SUFFIX = ".refused"
_DAMAGED_SUFFIX = ".damaged"
_NAME_LENGTH = 80
_COPY = re.compile(r"-[0-9a-f]{16}-\d+\.jsonl$")

# Some 200,000 evaluations.
_LARGEST_FILE_BYTES = 64 * 2**20
# Where memory ran out on many ranks at once, one of the first to say so is enough.
_RANKS_ASKED = 8

Item = Evaluation | Ending | PowerLimitChoice
"""What can wait: where a trial stood, how it ended, and what it found out of its power limits."""


class OutboxFileError(Exception):
    """A file of the outbox cannot be read as one."""


OutboxFileBusyError = _files.FileBusyError
"""Another process writes the file or delivers from it."""


class OutboxHeader(WireMessage):
    """The first line of a file: the job, the trial and the server that its results belong to.

    Attributes:
        registration: The job on its hardware, with its `job_id`.
        guessed: Fields of the job that a registration under its id overrides.
        trial: None for one that began while the server was away.
        key: By which such a trial is recorded, once; None for any other.
    """

    format: Literal["zeus-outbox"] = "zeus-outbox"
    version: Literal[1] = 1
    server_url: str
    registration: JobRegistration
    batch_size: int
    guessed: tuple[str, ...] = ()
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
    """A line after the first: exactly one of its fields. `delivered` counts the items that were, so far.

    Beside `trial`, `resumes` says that a run has resumed that the server has not given the trial to.
    """

    evaluation: Evaluation | None = None
    ending: Ending | None = None
    power_limits: PowerLimitChoice | None = None
    delivered: int | None = None
    trial: TrialId | None = None
    resumes: bool = False


@dataclass(frozen=True)
class _Waiting:
    """An item and, once it is on the disk, its number among the items of the file."""

    item: Item
    number: int | None = None


class OutboxFile:
    """One open and locked file of the outbox; not for several threads at once. `Outbox` opens it.

    Without a file, what is put in is kept in memory alone. `trial` is None while the server has not recorded it; while
    the box `resumes`, the trial is to be taken over from an earlier run of the training before anything is delivered;
    `latest` is the last evaluation that was put in, delivered or not. Lines that cannot be read hold up no other: there
    are `damaged_lines` of them, and the file is set aside with them once nothing else in it waits.
    """

    def __init__(self, path: Path, file: IO[bytes] | None, sender: OutboxHeader) -> None:
        self.path = path
        self._file = file
        self.sender = sender
        self.trial = sender.trial
        self.resumes = False
        # Those on the disk come first.
        self._waiting: deque[_Waiting] = deque()
        self._written = 0
        self.damaged_lines = 0
        self.latest: Evaluation | None = None

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a file, open, and not only this process's memory."""
        return self._file is not None

    @property
    def first(self) -> Item | None:
        """The next item to deliver, or None."""
        return self._waiting[0].item if self._waiting else None

    @property
    def has_ending(self) -> bool:
        """Whether the last thing to be delivered, but for power limits, is how the training ended."""
        others = (it.item for it in reversed(self._waiting) if not isinstance(it.item, PowerLimitChoice))
        return isinstance(next(others, None), Ending)

    @property
    def kept(self) -> int:
        """The number of items to deliver that are on the disk."""
        return sum(waiting.number is not None for waiting in self._waiting)

    def __len__(self) -> int:
        """The number of items to deliver."""
        return len(self._waiting)

    def put(self, item: Item) -> None:
        """Add something to be delivered, on the disk; where that raises, it is still delivered by this process."""
        self._take_in(item)
        self.keep()

    def keep(self) -> None:
        """Put on the disk, in order, what could not be put there before."""
        for index, waiting in enumerate(self._waiting):
            if waiting.number is None and self._write(_line_of(waiting.item)):
                self._written += 1
                self._waiting[index] = _Waiting(waiting.item, self._written)

    def true_ending(self, ending: Ending) -> Ending:
        """The end of the training: not as this process takes it if memory ran out on another of its ranks."""
        if ending.outcome not in (TrialState.FAILED, TrialState.SUSPENDED):
            return ending
        for copy in range(_RANKS_ASKED):
            path = self.path.with_name(self.sender.file_name(copy))
            # The rank that wrote it may still have it locked.
            with contextlib.suppress(OSError, ValueError, IndexError, _files.ForeignFileError):  # empty, too
                if path != self.path:
                    with _files.open_own(path) as file:
                        last = _Line.model_validate_json(file.read(_LARGEST_FILE_BYTES).splitlines()[-1:][0]).ending
                    if last is not None and last.outcome is TrialState.INFEASIBLE:
                        return last
        return ending

    def name(self, trial: TrialId | None, *, resumes: bool = False) -> None:
        """Note under which name and lease epoch the server has the trial; or that it is still to be taken over."""
        self.trial, self.resumes = trial, resumes
        # Without the note it is recorded again, under the same key and so as the same trial, or taken over again.
        with contextlib.suppress(OSError):
            self._write(_Line(trial=trial, resumes=True) if resumes else _Line(trial=trial))

    def drop_first(self) -> None:
        """Note that the first item was delivered."""
        number = self._waiting.popleft().number
        if number is None:
            return
        # Without the note it is delivered again, which the server bears.
        with contextlib.suppress(OSError):
            self._write(_Line(delivered=number))

    def drop_all(self) -> None:
        """Note that nothing more is to be delivered but power limits, which a trial that has ended may have left."""
        kept = [waiting.item for waiting in self._waiting if isinstance(waiting.item, PowerLimitChoice)]
        while self._waiting:
            self.drop_first()
        for item in kept:
            # Those are delivered as long as this process lives, even if the disk does not take them again.
            with contextlib.suppress(OSError):
                self.put(item)

    def refuse(self) -> Path | None:
        """Set the file aside, because the server does not want it; where it is now, or None if that was impossible."""
        aside: Path | None = None
        # Somebody may have removed it, or taken the right to its directory.
        with contextlib.suppress(OSError):
            aside = _files.set_aside(self.path, _REFUSED_SUFFIX) if self._file is not None else None
        self._waiting.clear()
        self._release()
        return aside

    def close(self) -> Path | None:
        """Let others have the file. It is removed if nothing in it waits; where it is now if it was set aside."""
        aside: Path | None = None
        if self._file is not None and not self._waiting:
            # What stays is found to be delivered already.
            with contextlib.suppress(OSError):
                if self.damaged_lines:
                    aside = _files.set_aside(self.path, _DAMAGED_SUFFIX)
                else:
                    self.path.unlink()
        self._release()
        return aside

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

    def _take_in(self, item: Item, number: int | None = None) -> None:
        self._waiting.append(_Waiting(item, number))
        if isinstance(item, Evaluation):
            self.latest = item

    def _read(self, lines: Iterable[bytes]) -> None:
        for text in lines:
            try:
                line = _Line.model_validate_json(text)
            except ValidationError:
                line = _Line()
            item = line.evaluation or line.ending or line.power_limits
            if item is not None:
                self._written += 1
                self._take_in(item, self._written)
            elif line.trial is not None or line.resumes:
                self.trial, self.resumes = line.trial, line.resumes
            elif line.delivered is not None:
                while self._waiting and (self._waiting[0].number or 0) <= line.delivered:
                    self._waiting.popleft()
            else:
                # It counts as an item, so that no other one is taken for delivered in its place.
                self._written += 1
                self.damaged_lines += 1

    def _release(self) -> None:
        if self._file is not None:
            _files.close(self._file)
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
    """A directory of results that wait; made when the first one is put into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def waiting(self) -> list[Path]:
        """Files with results that wait, oldest first; the second and further ones of a trial after all first ones."""
        return sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda path: (bool(_COPY.search(path.name)), *_age(path)))

    def refused(self) -> list[Path]:
        """Files that a server did not want, oldest first."""
        return sorted(self.directory.glob(f"*{_REFUSED_SUFFIX}"), key=_age)

    def damaged(self) -> list[Path]:
        """Files with lines that could not be read, from which all else was delivered, oldest first."""
        return sorted(self.directory.glob(f"*{_DAMAGED_SUFFIX}"), key=_age)

    def box(self, sender: OutboxHeader, *, is_first: bool = True) -> OutboxFile:
        """The trial's file, as an earlier run has left it, or a new one; not the first for who only adds to it."""
        _files.make_private(self.directory)
        for copy in count(0 if is_first else 1):
            path = self.directory / sender.file_name(copy)
            # An earlier run's may be just being delivered.
            with contextlib.suppress(OutboxFileBusyError):
                box = self._opened(path, sender)
                if not _is_of_other_run(box.trial, sender.trial):
                    return box
                box.close()
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
            _files.set_aside(path, _REFUSED_SUFFIX)
        box = OutboxFile(path, _files.open_locked(path, create=True), sender)
        try:
            box._write(sender)
            _files.sync_directory(self.directory)
        except OSError:
            box.close()
            raise
        return box

    def open(self, path: Path) -> OutboxFile:
        """Open one of the files that wait.

        Raises:
            OutboxFileBusyError: Another process has it.
            OutboxFileError: It is none, or from another version; it is left as it is.
            FileNotFoundError: Its last result was delivered meanwhile.
        """
        try:
            file = _files.open_locked(path)
        except _files.ForeignFileError as error:
            raise OutboxFileError(f"{error}: nothing is delivered from it") from None
        try:
            if os.fstat(file.fileno()).st_size > _LARGEST_FILE_BYTES:
                raise OutboxFileError(f"{path} is too large for a file of results that wait for a server")
            # The last line, without an end, is of a process that died while it wrote.
            first, *lines = file.read().split(b"\n")
            box = OutboxFile(path, file, OutboxHeader.model_validate_json(first if lines else b""))
            box._read(lines[:-1])
            file.truncate(sum(len(line) + 1 for line in (first, *lines[:-1])))
        except ValidationError as error:
            _files.close(file)
            raise OutboxFileError(f"{path} is no file of results that wait for a server: {error}") from None
        except (OSError, OutboxFileError):
            _files.close(file)
            raise
        return box


def _is_of_other_run(kept: TrialId | None, sent: TrialId | None) -> bool:
    """True if the server, which takes results of one run, would refuse a file's other results for the sake of these."""
    if kept is None or sent is None:
        return False
    epochs, registrations = {kept.lease_epoch, sent.lease_epoch}, {kept.registration_id, sent.registration_id}
    return len(epochs - {None}) > 1 or len(registrations - {None}) > 1


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory of waiting results: ``ZEUS_STATE_DIR``, else ``zeus-plugins`` in the platform's place for state."""
    stated = environment.STATE_DIRECTORY.text(environ)
    if stated:
        return Path(stated)
    try:
        home = Path.home()
    except RuntimeError:  # A container's user without a name or a HOME. Others share the place for temporary files.
        if sys.platform != "win32":
            return Path(environment.XDG_STATE_HOME.text(environ) or _temporary()) / "zeus-plugins"
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


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"user-{os.geteuid()}"
