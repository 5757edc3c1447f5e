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
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import IO, Literal, NamedTuple

from pydantic import ValidationError

from zeus_plugins import files
from zeus_plugins.protocol import CreatedJob, Ending, Evaluation, PowerLimitChoice, TrialId, TrialState, WireMessage

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
"""A thing that can wait: where a trial stood, how it ended, or what it found out of its power limits."""


class OutboxFileError(Exception):
    """A file of the outbox cannot be read as one."""


OutboxFileBusyError = files.FileBusyError
"""Another process writes the file or delivers from it."""


class OutboxHeader(WireMessage):
    """The first line of a file: the job, the trial and the server that its results belong to.

    Attributes:
        registration: The job on its hardware.
        guessed: Fields of the job that a registration under its id overrides.
        trial: None for one that began while the server was away.
        key: By which such a trial is recorded, once; None for any other.
    """

    format: Literal["zeus-outbox"] = "zeus-outbox"
    version: Literal[1] = 1
    server_url: str
    registration: CreatedJob
    batch_size: int
    guessed: tuple[str, ...] = ()
    trial: TrialId | None = None
    key: str | None = None

    def file_name(self, copy: int = 0) -> str:
        """Return one name for the same trial of the same server and the same `copy`, fit for every file system."""
        job_id = self.registration.job_id
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


def _line_of(item: Item) -> _Line:
    match item:
        case Evaluation():
            return _Line(evaluation=item)
        case Ending():
            return _Line(ending=item)
        case PowerLimitChoice():
            return _Line(power_limits=item)


class _Waiting(NamedTuple):
    """An item and, once it is on the disk, its number among the items of the file."""

    item: Item
    number: int | None


class OutboxFile:
    """A trial's results that wait, in one open and locked file; not for several threads at once.

    They are in memory alone until `Outbox` opens the file, and again after `close`. `trial` is None while the server
    has not recorded it; while the file `resumes`, the trial is to be taken over from an earlier run of the training
    before anything is delivered; `latest` is the last evaluation that was put in, delivered or not. Lines that cannot
    be read hold up no other: there are `damaged_lines` of them, and the file is set aside with them once nothing else
    in it waits.
    """

    def __init__(self, sender: OutboxHeader, *, resumes: bool = False) -> None:
        self.sender = sender
        self.path = Path(sender.file_name())
        self.trial = sender.trial
        self.resumes = resumes
        self.damaged_lines = 0
        self.latest: Evaluation | None = None
        self._file: IO[bytes] | None = None
        # Those on the disk come first.
        self._waiting: deque[_Waiting] = deque()
        self._written = 0

    @property
    def is_on_disk(self) -> bool:
        """True if the file is open, and not all in this process's memory alone."""
        return self._file is not None

    @property
    def is_delivered(self) -> bool:
        """True if the server knows the trial and nothing waits."""
        return self.trial is not None and not self.resumes and not self._waiting

    @property
    def first(self) -> Item | None:
        """The next item to deliver, or None."""
        return self._waiting[0].item if self._waiting else None

    @property
    def has_ending(self) -> bool:
        """True if the last item, but for power limits, is how the training ended."""
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
        """Add something to be delivered, on the disk; if that raises, this process still delivers it."""
        self._take_in(item, None)
        self.keep()

    def keep(self) -> None:
        """Put on the disk, in order, what could not be put there before."""
        for index, waiting in enumerate(self._waiting):
            if waiting.number is None and self._write(_line_of(waiting.item)):
                self._written += 1
                self._waiting[index] = _Waiting(waiting.item, self._written)

    def true_ending(self, ending: Ending) -> Ending:
        """Return the end of the training, which differs from this process's if memory ran out on another rank."""
        if ending.outcome not in (TrialState.FAILED, TrialState.SUSPENDED):
            return ending
        for copy in range(_RANKS_ASKED):
            path = self.path.with_name(self.sender.file_name(copy))
            # The rank that wrote it may still have it locked.
            with contextlib.suppress(OSError, ValueError, IndexError, files.ForeignFileError):  # empty, too
                if path != self.path:
                    with files.open_own(path) as file:
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
        """Note that the first item was delivered, unless the box was refused meanwhile."""
        number = self._waiting.popleft().number if self._waiting else None
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
            aside = files.set_aside(self.path, _REFUSED_SUFFIX) if self._file is not None else None
        self._waiting.clear()
        self._release()
        return aside

    def close(self) -> Path | None:
        """Let others have the file. It is removed if nothing in it waits; where it is now if it was set aside."""
        aside: Path | None = None
        if self._file is not None and not self._waiting:
            # If the file cannot be removed, its next reader finds everything delivered.
            with contextlib.suppress(OSError):
                if self.damaged_lines:
                    aside = files.set_aside(self.path, _DAMAGED_SUFFIX)
                else:
                    self.path.unlink()
        self._release()
        return aside

    def _release(self) -> None:
        if self._file is not None:
            files.close(self._file)
            self._file = None

    def _write(self, line: WireMessage) -> bool:
        """Put a line on the disk; False if there is no file."""
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

    def _begin(self, path: Path) -> None:
        """Begin a new file."""
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
        """Go on with the file of an earlier run, whose items come first."""
        self.path, self._file = earlier.path, earlier._file
        self._waiting, self._written = earlier._waiting, earlier._written
        self.damaged_lines, self.latest = earlier.damaged_lines, earlier.latest
        trial, resumes = earlier.trial or self.trial, self.resumes or earlier.resumes
        self.trial, self.resumes = trial, resumes
        if (trial, resumes) != (earlier.trial, earlier.resumes):
            self.name(trial, resumes=resumes)

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


class Outbox:
    """A directory of results that wait; made when the first one is put into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def waiting(self) -> list[Path]:
        """Return the files with results that wait, oldest first; further ones of a trial after all first ones."""
        return sorted(self.directory.glob(f"*{_SUFFIX}"), key=lambda path: (bool(_COPY.search(path.name)), *_age(path)))

    def refused(self) -> list[Path]:
        """Return the files that a server did not want, oldest first."""
        return sorted(self.directory.glob(f"*{_REFUSED_SUFFIX}"), key=_age)

    def damaged(self) -> list[Path]:
        """Return the files with lines that could not be read, from which all else was delivered, oldest first."""
        return sorted(self.directory.glob(f"*{_DAMAGED_SUFFIX}"), key=_age)

    def box(self, sender: OutboxHeader, *, is_first: bool = True) -> OutboxFile:
        """Open the trial's file that an earlier run has left, or a new one; see `put_on_disk`."""
        box = OutboxFile(sender)
        self.put_on_disk(box, is_first=is_first)
        return box

    def put_on_disk(self, box: OutboxFile, *, is_first: bool = True) -> None:
        """Give a box in which nothing waits yet its file: one that an earlier run has left, or a new one.

        Args:
            box: The box.
            is_first: Whether the trial's first file will do; False for a process that only adds to it.

        Raises:
            OSError: The file or the directory cannot be written, or is another user's.
        """
        files.make_private(self.directory)
        for copy in count(0 if is_first else 1):
            path = self.directory / box.sender.file_name(copy)
            # Another process may be just delivering an earlier run's file.
            with contextlib.suppress(OutboxFileBusyError):
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
        """Return the trial's last evaluation that an earlier run has left, or None."""
        try:
            box = self.open(self.directory / sender.file_name())
        except (OutboxFileBusyError, OutboxFileError, OSError):
            return None
        latest = box.latest
        box.close()
        return latest

    def open(self, path: Path) -> OutboxFile:
        """Open one of the files that wait.

        Raises:
            OutboxFileBusyError: Another process has it.
            OutboxFileError: It is no such file; it is left as it is.
            FileNotFoundError: Its last result was delivered meanwhile.
        """
        try:
            file = files.open_locked(path)
        except files.ForeignFileError as error:
            raise OutboxFileError(f"{error}: nothing is delivered from it") from None
        try:
            if os.fstat(file.fileno()).st_size > _LARGEST_FILE_BYTES:
                raise OutboxFileError(f"{path} is too large for a file of results that wait for a server")
            # The last line, without an end, is of a process that died while it wrote.
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
    """True if the server, which takes results of one run, would refuse a file's other results for the sake of these."""
    if kept is None or sent is None:
        return False
    epochs, registrations = {kept.lease_epoch, sent.lease_epoch}, {kept.registration_id, sent.registration_id}
    return len(epochs - {None}) > 1 or len(registrations - {None}) > 1


def default_outbox(environ: Mapping[str, str] | None = None) -> Outbox:
    """Return the outbox in this user's directory for state."""
    return Outbox(files.state_directory(environ) / "outbox")


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:  # If it was removed meanwhile or is out of reach, opening it tells.
        return 0.0, path.name
