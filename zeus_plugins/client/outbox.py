"""Results that wait for the server, on disk: one file of JSON lines for each trial.

The first line of a file is its `OutboxHeader`; the others are items to deliver, in order, and notes of their delivery.
Each line is on the disk before the training continues. A process that writes a file or delivers from it holds the
file's lock: the training while it runs, later the next training with the same server, or ``zeus-plugins sync``. A file
with nothing left to deliver is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import IO, Literal, NamedTuple

from pydantic import ValidationError

from zeus_plugins import files
from zeus_plugins.protocol import CreatedJob, Ending, Evaluation, TrialId, TrialState, WireMessage

_SUFFIX = ".jsonl"
_REFUSED_SUFFIX = ".refused"
_NAME_LENGTH = 80
_COPY = re.compile(r"-[0-9a-f]{16}-\d+\.jsonl$")

# About 200,000 evaluations.
_LARGEST_FILE_BYTES = 64 * 2**20
# Many ranks may run out of memory at once; the file of one of them is enough.
_RANKS_ASKED = 8

Item = Evaluation | Ending


class OutboxFileError(Exception):
    """A path in the outbox is not a readable outbox file."""


class OutboxHeader(WireMessage):
    """The first line of a file: the job, the trial and the server that its results belong to.

    Attributes:
        registration: The job on its hardware.
        guessed: Inferred fields of the job; a job that is already registered under its id overrides them.
        trial: None for a trial that the server has not recorded yet.
        key: Idempotency key for recording a trial that has no `trial` yet; None for any other trial.
        continues: Number of the trial whose run this trial finishes; None if it finishes no other trial's run.
    """

    format: Literal["zeus-outbox"] = "zeus-outbox"
    version: Literal[1] = 1
    server_url: str
    registration: CreatedJob
    batch_size: int
    guessed: tuple[str, ...] = ()
    trial: TrialId | None = None
    key: str | None = None
    continues: int | None = None

    def file_name(self, copy: int = 0) -> str:
        """Return the file name for this server, trial and `copy`, valid on every file system."""
        job_id = self.registration.job_id
        which = self.key if self.key is not None else (self.trial.trial_number if self.trial else None)
        digest = hashlib.sha256(json.dumps([self.server_url, job_id, which]).encode()).hexdigest()[:16]
        readable = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in job_id[:_NAME_LENGTH])
        return f"{readable}-{digest}{f'-{copy}' if copy else ''}{_SUFFIX}"


class _Line(WireMessage):
    """A line after the first: an item, the number of the last delivered item, or a note about the trial.

    `trial` is the trial as the server has recorded it; `resumes` is True while this run must still take it over.
    """

    evaluation: Evaluation | None = None
    ending: Ending | None = None
    delivered: int | None = None
    trial: TrialId | None = None
    resumes: bool = False


def _line_of(item: Item) -> _Line:
    return _Line(ending=item) if isinstance(item, Ending) else _Line(evaluation=item)


class _Waiting(NamedTuple):
    """An item, and its number among the items of the file, or None while it is in memory only."""

    item: Item
    number: int | None


class OutboxFile:
    """The waiting results of one trial, in an open and locked file. Threads that share the box hold its `lock`.

    Before `Outbox` opens the file and after `close`, the results are in memory only. `trial` is None while the server
    has not recorded it. If the box `resumes`, the trial must be taken over from an earlier run before anything is
    delivered. `latest` is the last evaluation that was put in, delivered or not. `damaged_lines` is the number of lines
    that cannot be read: the other lines are delivered, and then the file is set aside.
    """

    def __init__(self, sender: OutboxHeader, *, resumes: bool = False) -> None:
        self.sender = sender
        self.lock = threading.RLock()
        self.path = Path(sender.file_name())
        self.trial = sender.trial
        self.resumes = resumes
        self.damaged_lines = 0
        self.latest: Evaluation | None = None
        self._file: IO[bytes] | None = None
        # Items on disk precede items in memory.
        self._waiting: deque[_Waiting] = deque()
        self._written = 0

    @property
    def is_delivered(self) -> bool:
        """True if the server has recorded the trial, this run has taken it over if necessary, and nothing waits."""
        return self.trial is not None and not self.resumes and not self._waiting

    @property
    def first(self) -> Item | None:
        """The next item to deliver, or None."""
        return self._waiting[0].item if self._waiting else None

    @property
    def kept(self) -> int:
        """The number of items to deliver that are on the disk."""
        return sum(waiting.number is not None for waiting in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Item) -> None:
        """Add an item and write it to the disk; if this raises `OSError`, the item stays in memory."""
        self._take_in(item, None)
        self.keep()

    def keep(self) -> None:
        """Write the items that are in memory only, in order."""
        for index, waiting in enumerate(self._waiting):
            if waiting.number is None and self._write(_line_of(waiting.item)):
                self._written += 1
                self._waiting[index] = _Waiting(waiting.item, self._written)

    def true_ending(self, ending: Ending) -> Ending:
        """Return the ending of a rank that ran out of memory if it explains this rank's failure, else `ending`."""
        if ending.outcome not in (TrialState.FAILED, TrialState.SUSPENDED):
            return ending
        for copy in range(_RANKS_ASKED):
            path = self.path.with_name(self.sender.file_name(copy))
            if path == self.path:
                continue
            # Read without the lock, which the other rank may still hold. IndexError: the file is empty.
            with contextlib.suppress(OSError, ValueError, IndexError, files.ForeignFileError):
                with files.open_own(path) as file:
                    last = _Line.model_validate_json(file.read(_LARGEST_FILE_BYTES).splitlines()[-1]).ending
                if last is not None and last.outcome is TrialState.INFEASIBLE:
                    return last
        return ending

    def name(self, trial: TrialId | None, *, resumes: bool = False) -> None:
        """Note the trial as the server has recorded it and, with `resumes`, that this run must still take it over."""
        self.trial, self.resumes = trial, resumes
        # If the note is lost, the trial is recorded again under the same key, or taken over again.
        with contextlib.suppress(OSError):
            self._write(_Line(trial=trial, resumes=True) if resumes else _Line(trial=trial))

    def drop_first(self) -> None:
        """Note that the first item was delivered; do nothing if `refuse` has emptied the box."""
        number = self._waiting.popleft().number if self._waiting else None
        if number is not None:
            # If the note is lost, the item is delivered again, which the server accepts.
            with contextlib.suppress(OSError):
                self._write(_Line(delivered=number))

    def drop_all(self) -> None:
        """Note that no item has to be delivered any more."""
        while self._waiting:
            self.drop_first()

    def refuse(self) -> Path | None:
        """Set the file aside because the server refuses it; return its new path, or None if it cannot be renamed."""
        self._waiting.clear()
        return self._release(_REFUSED_SUFFIX)

    def close(self) -> Path | None:
        """Unlock the file, and delete it if nothing in it waits; return its new path if it was set aside."""
        return self._release(_REFUSED_SUFFIX if self.damaged_lines else None)

    def _release(self, suffix: str | None) -> Path | None:
        """Close the file; if nothing waits, delete it or, with a suffix, set it aside and return its new path."""
        aside: Path | None = None
        if self._file is not None:
            if not self._waiting:
                # If the file stays, its next reader finds everything delivered.
                with contextlib.suppress(OSError):
                    if suffix is None:
                        self.path.unlink()
                    else:
                        aside = files.set_aside(self.path, suffix)
            files.close(self._file)
            self._file = None
        return aside

    def _write(self, line: WireMessage) -> bool:
        """Write a line to the disk; return False if the file is not open."""
        if self._file is None:
            return False
        end = self._file.seek(0, os.SEEK_END)
        # Leave out the unset fields of a `_Line`; the header's fields that are None, such as beta_knob, have a meaning.
        data = line.model_dump_json(exclude_unset=isinstance(line, _Line)).encode() + b"\n"
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._file.fileno())
        except OSError:
            # Remove the half line, because it would make the next line unreadable.
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise
        return True

    def _begin(self, path: Path) -> None:
        self.path, self._file, self._written, self.damaged_lines = path, files.open_locked(path, create=True), 0, 0
        try:
            self._write(self.sender.model_copy(update={"trial": self.trial}))
            files.sync_directory(path.parent)
            if self.resumes:
                self.name(self.trial, resumes=True)
        except OSError:
            self.close()
            raise

    def _continue(self, earlier: OutboxFile) -> None:
        """Append to the file of an earlier run; the earlier run's items come first."""
        self.path, self._file = earlier.path, earlier._file
        self._waiting, self._written = earlier._waiting, earlier._written
        self.damaged_lines, self.latest = earlier.damaged_lines, earlier.latest
        # A run that has taken the trial over does not take it over again: that could take it from a later run.
        has_trial = self.trial is not None and self.trial.lease_epoch is not None and not self.resumes
        if not has_trial:
            self.trial, self.resumes = earlier.trial or self.trial, self.resumes or earlier.resumes
        if (self.trial, self.resumes) != (earlier.trial, earlier.resumes):
            self.name(self.trial, resumes=self.resumes)

    def _take_in(self, item: Item, number: int | None) -> None:
        self._waiting.append(_Waiting(item, number))
        if isinstance(item, Evaluation):
            self.latest = item

    def _read(self, file: IO[bytes], lines: Iterable[bytes]) -> None:
        self._file = file
        for text in lines:
            try:
                line = _Line.model_validate_json(text)
            except ValidationError:
                line = _Line()
            item = line.evaluation or line.ending
            if item is not None:
                self._written += 1
                self._take_in(item, self._written)
            elif line.trial is not None or line.resumes:
                self.trial, self.resumes = line.trial, line.resumes
            elif line.delivered is not None:
                while self._waiting and (self._waiting[0].number or 0) <= line.delivered:
                    self._waiting.popleft()
            else:
                # Count the damaged line as an item, so that later items keep their numbers.
                self._written += 1
                self.damaged_lines += 1


class Outbox:
    """A directory of results that wait, created when the first result is put into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def waiting(self) -> list[Path]:
        """Return the files with waiting results: first the files without a copy number, then copies, oldest first."""
        return sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda path: (bool(_COPY.search(path.name)), *_age(path)))

    def refused(self) -> list[Path]:
        """Return the files that a server refused, and those of which only damaged lines are left, oldest first."""
        return sorted(self.directory.glob(f"*{_REFUSED_SUFFIX}"), key=_age)

    def box(self, sender: OutboxHeader, *, is_first: bool = True) -> OutboxFile:
        """Return an open box for the trial; see `put_on_disk`."""
        box = OutboxFile(sender)
        self.put_on_disk(box, is_first=is_first)
        return box

    def put_on_disk(self, box: OutboxFile, *, is_first: bool = True) -> None:
        """Open a file for a new box: the file that an earlier run left, or a new one.

        Do nothing if the box has a file, or if items already wait in memory: they may be under way to the server, and
        have to keep their order. Ranks other than 0 do not try the trial's first file (`is_first` is False).

        Raises:
            OSError: The file or the directory cannot be written, or belongs to another user.
        """
        if box._file is not None or len(box):
            return
        # Set the path first: even without a file, `true_ending` searches this directory for files of other ranks.
        box.path = self.directory / box.sender.file_name()
        files.make_private(self.directory)
        for copy in count(0 if is_first else 1):
            path = self.directory / box.sender.file_name(copy)
            # If another process is delivering the file, try the next copy.
            with contextlib.suppress(files.FileBusyError):
                try:
                    earlier = self.open(path)
                except (FileNotFoundError, OutboxFileError) as error:
                    if isinstance(error, OutboxFileError):
                        files.set_aside(path, _REFUSED_SUFFIX)
                    box._begin(path)
                    return
                if not _is_of_other_run(earlier.trial, box.trial):
                    box._continue(earlier)
                    return
                earlier.close()

    def latest(self, sender: OutboxHeader) -> Evaluation | None:
        """Return the trial's last evaluation in the file that an earlier run left, or None."""
        try:
            box = self.open(self.directory / sender.file_name())
        except (files.FileBusyError, OutboxFileError, OSError):
            return None
        latest = box.latest
        box.close()
        return latest

    def open(self, path: Path) -> OutboxFile:
        """Open a file with waiting results.

        Raises:
            FileBusyError: Another process has locked it.
            OutboxFileError: It is not an outbox file, and stays unchanged.
            FileNotFoundError: Another process has delivered all of it.
        """
        try:
            file = files.open_locked(path)
        except files.ForeignFileError as error:
            raise OutboxFileError(f"{error}: nothing is delivered from it") from None
        try:
            if os.fstat(file.fileno()).st_size > _LARGEST_FILE_BYTES:
                raise OutboxFileError(f"{path} is too large for a file of results that wait for a server")
            # A process that died while it wrote may have left half a line after the last line feed.
            first, *lines = file.read().split(b"\n")
            box = OutboxFile(OutboxHeader.model_validate_json(first if lines else b""))
            box.path = path
            box._read(file, lines[:-1])
            file.truncate(sum(len(line) + 1 for line in (first, *lines[:-1])))
        except ValidationError as error:
            files.close(file)
            raise OutboxFileError(f"{path} is no file of results that wait for a server: {error}") from None
        except (OSError, OutboxFileError):
            files.close(file)
            raise
        return box


def _is_of_other_run(kept: TrialId | None, sent: TrialId | None) -> bool:
    """Return whether trial `kept` of a file and trial `sent` are of different runs, whose results must not be mixed."""
    if kept is None or sent is None:
        return False
    names = ("lease_epoch", "registration_id", "dispatch_id")
    return any(len({getattr(kept, name), getattr(sent, name)} - {None}) > 1 for name in names)


def default_outbox(environ: Mapping[str, str] | None = None) -> Outbox:
    """Return the outbox in this user's state directory."""
    return Outbox(files.state_directory(environ) / "outbox")


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # Opening the file reports the problem.
        return 0.0, path.name
