"""Foreign and accidental files in the outbox: none of them is followed, changed, or blocks delivery."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.answering import answering
from tests.support.fake_trainer import failing
from tests.support.outboxes import TRIAL, evaluation, items_of, left_by, sender, taken_from
from zeus_plugins import files
from zeus_plugins.cli import main
from zeus_plugins.client.delivery import deliver_waiting
from zeus_plugins.client.outbox import Item, Outbox, OutboxFile, OutboxFileError
from zeus_plugins.files import state_directory
from zeus_plugins.protocol import Ending, TrialState

FIVE: tuple[Item, ...] = (*(evaluation(epoch) for epoch in (1, 2, 3, 4)), Ending(outcome=TrialState.SUSPENDED))


@pytest.mark.parametrize("content", [b"", b"\n", b"half a li"])
def test_incomplete_file_of_a_second_rank_changes_no_ending(outbox: Outbox, content: bytes) -> None:
    box = outbox.box(sender())
    box.put(evaluation(1))
    box.path.with_name(sender().file_name(1)).write_bytes(content)
    failed = Ending(outcome=TrialState.FAILED)
    assert box.true_ending(failed) == failed
    box.close()


def test_ending_of_a_second_rank_is_read_only_from_the_outbox(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, infeasible = Ending(outcome=TrialState.FAILED), Ending(outcome=TrialState.INFEASIBLE)
    path = left_by(outbox, sender(), infeasible).rename(outbox.directory / sender().file_name(1))
    monkeypatch.chdir(tmp_path)
    path.rename(path.name)
    monkeypatch.setattr(files, "make_private", failing(PermissionError("a disk that only reads")))
    box = OutboxFile(sender())
    with pytest.raises(PermissionError):
        outbox.put_on_disk(box)
    assert box.true_ending(failed) == failed
    Path(path.name).rename(path)
    assert box.true_ending(failed) == infeasible


# --- Foreign files ----------------------------------------------------------------------------------------------------


def test_symbolic_link_is_not_followed(outbox: Outbox, tmp_path: Path) -> None:
    path = left_by(outbox, sender(), *FIVE)
    target = tmp_path / "thesis.jsonl"
    path.rename(target)
    content = target.read_bytes() + b"half a line"
    target.write_bytes(content)
    path.symlink_to(target)
    with pytest.raises(OutboxFileError, match="is not a regular file"):
        outbox.open(path)
    assert outbox.latest(sender()) is None
    left_by(outbox, sender(), evaluation(9))  # in a separate file instead of the link
    assert target.read_bytes() == content
    assert not path.is_symlink()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a FIFO", "a directory"])
def test_irregular_file_blocks_no_delivery(outbox: Outbox, make: object) -> None:
    left_by(outbox, sender(), evaluation(1))
    path = outbox.directory / "trap.jsonl"
    make(path)  # type: ignore[operator]  # both functions take a path
    told = {file.path: file.problem for file in deliver_waiting(outbox, lambda _: None)}
    assert "is not a regular file" in (told[path] or "")
    assert path.exists()


def test_files_and_directories_of_foreign_users_are_left(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by(outbox, sender(), evaluation(1))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OutboxFileError, match="is not a regular file of this user"):
        outbox.open(path)
    with pytest.raises(PermissionError, match="belongs to another user: set ZEUS_STATE_DIR"):
        outbox.box(sender())
    assert list(outbox.directory.iterdir()) == [path]


def test_directory_is_private(outbox: Outbox) -> None:
    outbox.directory.mkdir(parents=True, mode=0o755)
    outbox.directory.chmod(0o755)
    path = left_by(outbox, sender(), evaluation(1))
    assert stat.S_IMODE(outbox.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_users_without_a_home_have_separate_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a user id invented by a container
    for user in (2**31 - 7, 2**31 - 8):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        directory = state_directory({})
        # The system's temporary directory is shared: entries are named after their user, and made private.
        assert (directory.name, directory.parent.name) == ("zeus-plugins", f"user-{user}")
        assert state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/zeus-plugins")


def test_endless_file_is_not_read(outbox: Outbox) -> None:
    path = left_by(outbox, sender(), evaluation(1))
    os.truncate(path, 2**40)  # a sparse file that occupies almost no disk space
    with pytest.raises(OutboxFileError, match="too large"):
        outbox.open(path)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rubbish", [b"\x00\xff rubbish", b"{}", b'{"evaluation": {"time": "soon"}}', b'{"new": 1}'])
@pytest.mark.parametrize("line", range(1, 6))
def test_damaged_line_blocks_no_later_line(outbox: Outbox, line: int, rubbish: bytes) -> None:
    path = left_by(outbox, sender(), *FIVE)
    lines = path.read_bytes().split(b"\n")
    lines[line] = rubbish
    path.write_bytes(b"\n".join(lines))
    box = outbox.open(path)
    assert box.damaged_lines == 1
    assert items_of(box) == [item for number, item in enumerate(FIVE, 1) if number != line]
    aside = box.close()
    assert outbox.refused() == [aside]
    assert rubbish in outbox.refused()[0].read_bytes()
    assert outbox.waiting() == []


@pytest.mark.parametrize("delivered", range(1, 4))
@pytest.mark.parametrize("line", range(1, 6))
def test_damage_marks_no_waiting_result_as_delivered(outbox: Outbox, line: int, delivered: int) -> None:
    path = left_by(outbox, sender(), *FIVE)
    box = outbox.open(path)
    for _ in range(delivered):
        box.drop_first()
    box.close()
    lines = path.read_bytes().split(b"\n")
    lines[line] = b"rubbish"
    path.write_bytes(b"\n".join(lines))
    box = outbox.open(path)
    waits = [item for number, item in enumerate(FIVE, 1) if number not in (line, *range(1, delivered + 1))]
    box.put(evaluation(6))
    box.drop_first()
    box.close()
    assert taken_from(outbox, path) == [*waits, evaluation(6)][1:]


# --- Recipients of the token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_environment", [True, False])
def test_sync_sends_the_token_only_to_the_configured_server(
    outbox: Outbox, by_environment: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(404) as ours, answering(404) as other:
        for number, server in enumerate((ours, other), 1):
            left_by(outbox, sender(TRIAL.model_copy(update={"trial_number": number}), url=server.url), evaluation(1))
        monkeypatch.setenv("ZEUS_SERVER_URL", f"{ours.url}/")
        if by_environment:
            monkeypatch.setenv("ZEUS_BSO_TOKEN", "s3cret")
        main(["sync", *([] if by_environment else ["--token", "s3cret"])])
        assert ours.tokens == ["Bearer s3cret"]
        assert other.tokens == [None]
        complaint = capsys.readouterr().err
        assert f"{other.url} is sent no token, as the token belongs to {ours.url};" in complaint
        assert "s3cret" not in complaint
        assert f"{ours.url} is sent no token" not in complaint


def test_token_without_a_server_is_sent_nowhere(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ZEUS_SERVER_URL", raising=False)
    with answering(404) as other:
        left_by(outbox, sender(url=other.url), evaluation(1))
        main(["sync", "--token", "s3cret"])
        assert other.tokens == [None]
        assert f"ZEUS_SERVER_URL={other.url} zeus-plugins sync" in capsys.readouterr().err


def test_token_is_sent_to_the_servers_named_by_the_user(outbox: Outbox, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(404) as ours:
        left_by(outbox, sender(url="http://old.invalid"), evaluation(1))
        main(["sync", "--token", "s3cret", "--server-url", ours.url])
        assert ours.tokens == ["Bearer s3cret"]
        assert "is sent no token" not in capsys.readouterr().err


def test_sync_reports_damage(outbox: Outbox, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = left_by(outbox, sender(), evaluation(1))
    path.write_bytes(path.read_bytes().replace(b'"metric"', b'"met\xff'))
    assert main(["sync", "--server-url", f"embedded://{tmp_path / 'bso.sqlite3'}"]) == 1
    told, complaint = capsys.readouterr()
    (aside,) = outbox.refused()
    assert "nothing waits; 1 lines cannot be read" in told
    assert f"{aside}: set aside: refused by its server, or not readable in part" in told
    assert "some lines cannot be read" in complaint
