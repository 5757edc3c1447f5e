"""Results that wait on disk for a server: no crash at any moment loses or repeats a result."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import warm
from tests.support.answering import answering
from tests.support.contract_double import ContractDouble
from tests.support.fake_trainer import failing
from tests.support.outboxes import (
    TRIAL,
    dispatched,
    evaluation,
    facts,
    items_of,
    left_by,
    no_more_room,
    sender,
    taken_from,
)
from tests.support.properties import examples
from tests.support.servers import ServerProcess
from zeus_plugins import files
from zeus_plugins.cli import main
from zeus_plugins.client.delivery import Delivered, deliver, deliver_waiting
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Item, Outbox, OutboxFile, OutboxFileError, OutboxHeader
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOServerUnreachableError
from zeus_plugins.files import FileBusyError, state_directory
from zeus_plugins.protocol import Ending, OfflineTrial, TrialId, TrialState

TOO_LARGE = r"File too large|No space left"
THREE = (evaluation(1), evaluation(2), Ending(detail="gone"))


def trial(number: int) -> TrialId:
    return TRIAL.model_copy(update={"trial_number": number})


# --- files ------------------------------------------------------------------------------------------------------------


def test_results_are_read_in_order_by_another_process(outbox: Outbox) -> None:
    path = left_by(outbox, sender(), *THREE)
    assert outbox.waiting() == [path]
    with closing(outbox.open(path)) as again:
        assert (again.sender, again.trial, again.latest, len(again)) == (sender(), TRIAL, evaluation(2), 3)
        assert items_of(again) == list(THREE)
    assert outbox.waiting() == []


def test_later_run_of_a_trial_continues_the_same_file(outbox: Outbox) -> None:
    left_by(outbox, sender(), THREE[0])
    path = left_by(outbox, sender(), THREE[1])
    assert taken_from(outbox, path) == list(THREE[:2])


def test_offline_trial_keeps_the_file_after_getting_a_number(outbox: Outbox) -> None:
    box = outbox.box(sender(None, key="made-here"))
    box.put(THREE[0])
    assert box.trial is None
    box.name(TRIAL)
    box.close()
    with closing(outbox.box(sender(TRIAL, key="made-here"))) as named:
        assert (named.trial, len(named)) == (TRIAL, 1)


def test_run_continuing_a_file_records_the_known_trial(outbox: Outbox) -> None:
    path = left_by(outbox, sender(None, key="made-here"), THREE[0])
    box = OutboxFile(sender(TRIAL, key="made-here"), resumes=True)
    outbox.put_on_disk(box)
    box.close()
    with closing(outbox.open(path)) as again:
        assert (again.trial, again.resumes, items_of(again)) == (TRIAL, True, [THREE[0]])


@pytest.mark.parametrize("known", [TRIAL, None], ids=["known to the server", "offline"])
def test_run_after_a_take_over_does_not_take_over_again(outbox: Outbox, known: TrialId | None) -> None:
    earlier = OutboxFile(sender(known, key="made-here"), resumes=True)
    outbox.put_on_disk(earlier)
    earlier.put(THREE[0])
    earlier.close()
    mine = TRIAL.model_copy(update={"lease_epoch": 3})
    with closing(outbox.box(sender(mine, key="made-here"))) as box:
        assert (box.trial, box.resumes, len(box)) == (mine, False, 1)


IDS: dict[str, Any] = {"lease_epoch": 1, "registration_id": "a", "dispatch_id": "a"}
MINE = TRIAL.model_copy(update={"job_id": "digits:1", **IDS})  # as a file name equal to "digits@1"


OTHERS = {
    "server": sender(MINE, url="http://elsewhere", job_id="digits:1"),
    "job": sender(MINE.model_copy(update={"job_id": "digits@1"}), job_id="digits@1"),
    **{
        name: sender(MINE.model_copy(update={name: value}), job_id="digits:1")
        for name, value in {"trial_number": 8, "lease_epoch": 2, "registration_id": "b", "dispatch_id": "b"}.items()
    },
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_trials_and_their_runs_use_separate_files(outbox: Outbox, other: OutboxHeader) -> None:
    path = left_by(outbox, sender(MINE, job_id="digits:1"), THREE[0])
    with closing(outbox.box(other)) as another:
        assert (len(another), another.path == path) == (0, False)


def test_job_id_with_characters_unfit_for_file_names_is_encoded(outbox: Outbox) -> None:
    job_id = "digits:@" + "x" * 240
    with closing(outbox.box(sender(TRIAL.model_copy(update={"job_id": job_id}), job_id=job_id))) as box:
        assert re.fullmatch(r"digits__x{72}-[0-9a-f]{16}\.jsonl", box.path.name)


def test_file_is_locked_by_a_single_process(outbox: Outbox) -> None:
    box = outbox.box(sender())
    box.put(THREE[0])
    with pytest.raises(FileBusyError):
        outbox.open(box.path)
    assert list(deliver_waiting(outbox, lambda _: pytest.fail("not ours to deliver"))) == []
    # A process with results of the same trial does not wait for the lock.
    with closing(outbox.box(sender())) as second:
        assert second.path != box.path
    box.close()
    outbox.open(box.path).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_keeps_no_file_locked(outbox: Outbox) -> None:
    box = outbox.box(sender())
    box.put(THREE[0])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # a worker of a data loader that outlives the trial
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    box.close()
    try:
        outbox.open(box.path).close()
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_oldest_file_comes_first(outbox: Outbox) -> None:
    paths = [left_by(outbox, sender(trial(n)), THREE[0]) for n in (1, 2, 3)]
    for age_s, path in enumerate(sorted(paths)):
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert outbox.waiting() == sorted(paths, reverse=True)


def write_and_die(directory: Path) -> None:
    box = Outbox(directory).box(sender())
    for item in THREE:
        box.put(item)
    os.kill(os.getpid(), signal.SIGKILL)


def test_stored_results_survive_sigkill(outbox: Outbox) -> None:
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(outbox.directory,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (path,) = outbox.waiting()
    assert taken_from(outbox, path) == list(THREE)


@settings(max_examples=examples(60), deadline=None)
@given(cut=st.integers(min_value=0, max_value=2000), delivered=st.integers(min_value=0, max_value=3))
def test_truncated_file_loses_at_most_the_last_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int, delivered: int
) -> None:
    outbox = Outbox(tmp_path_factory.mktemp("outbox"))
    box = outbox.box(sender())
    sizes = [box.path.stat().st_size]
    for item in THREE:
        box.put(item)
        sizes.append(box.path.stat().st_size)
    box.close()
    cut = sizes[0] + cut % (sizes[-1] - sizes[0] + 1)
    os.truncate(box.path, cut)
    whole = sum(size <= cut for size in sizes[1:])

    again = outbox.open(box.path)
    assert len(again) == whole
    for _ in range(min(delivered, whole)):
        again.drop_first()
    again.put(Ending(detail="after the cut"))
    again.close()
    assert taken_from(outbox, box.path) == [*THREE[delivered:whole], Ending(detail="after the cut")]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n\n\n", b"no line", b"{}\n", b"something else\n", b'{"somebody": "else"}\nand half a line'),
        b'{"format": "zeus-outbox", "version": 2}\n',
    ],
)
def test_invalid_file_is_reported_and_left_unchanged(outbox: Outbox, content: bytes) -> None:
    path = left_by(outbox, sender(), *THREE)
    path.write_bytes(content)
    with pytest.raises(OutboxFileError, match=re.escape(str(path))):
        outbox.open(path)
    (file,) = deliver_waiting(outbox, lambda _: pytest.fail("nothing to deliver"))
    assert (file.path, file.delivered) == (path, 0)
    assert str(path) in (file.problem or "")
    assert path.read_bytes() == content
    # A training with this file name starts another file, and the old content is kept.
    with closing(outbox.box(sender())):
        assert [kept.read_bytes() for kept in outbox.refused()] == [content]


@pytest.mark.parametrize("delivered", [0, 2])
def test_full_disk_damages_no_result(outbox: Outbox, delivered: int) -> None:
    box = outbox.box(sender())
    box.put(THREE[0])
    with no_more_room(box.path), pytest.raises(OSError, match=TOO_LARGE):
        box.put(THREE[1])
    box.put(THREE[2])
    assert len(box) == 3  # all results are delivered while this process lives
    for _ in range(delivered):
        box.drop_first()
    box.close()
    assert taken_from(outbox, box.path) == list(THREE[delivered:])  # in order, because the disk has space again


def test_file_system_without_locks_is_reported_immediately(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def lock(file: object, _operation: int) -> None:
        tried.append(file)
        assert len(tried) < 10, "it tries for ever"
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", lock)
        with pytest.raises(OSError, match="Function not implemented"):
            outbox.box(sender())
        assert outbox.waiting() == []
        path = outbox.directory / sender().file_name()
        path.write_text(sender().model_dump_json() + "\n")
        (file,) = deliver_waiting(outbox, lambda _: pytest.fail("it cannot be locked"))
        assert "Function not implemented" in (file.problem or "")
    assert outbox.waiting() == [path]


def test_externally_removed_file_can_be_refused(outbox: Outbox) -> None:
    box = outbox.box(sender())
    box.put(THREE[0])
    box.path.unlink()
    assert box.refuse() is None
    assert len(box) == 0


def test_results_set_aside_are_kept(outbox: Outbox) -> None:
    aside = set()
    for item in THREE:
        box = outbox.box(sender())
        box.put(item)
        aside.add(box.refuse())
    assert len(aside) == 3
    assert set(outbox.refused()) == aside


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"ZEUS_STATE_DIR": "/var/zeus", "XDG_STATE_HOME": "/x"}, "/var/zeus"),
        ({"XDG_STATE_HOME": "/x"}, "/x/zeus-plugins"),
        ({"ZEUS_STATE_DIR": ""}, str(Path.home() / ".local/state/zeus-plugins")),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other places")
def test_directory_follows_the_environment(environ: dict[str, str], directory: str) -> None:
    assert str(state_directory(environ)) == directory


# --- delivery, to a real server ---------------------------------------------------------------------------------------


def synced(outbox: Outbox, client: BsoClient) -> list[Delivered]:
    return list(deliver_waiting(outbox, lambda _: client))


@pytest.mark.parametrize("delivered", [1, 2, 3])
def test_results_with_lost_answers_arrive_once(outbox: Outbox, client: BsoClient, delivered: int) -> None:
    """The server has stored the results, but the delivering process died before it recorded the delivery."""
    begun = dispatched(client)
    items = [evaluation(1), evaluation(2), evaluation(3, metric=0.95)]
    path = left_by(outbox, sender(begun, url=client.server_url), *items)
    box = outbox.open(path)
    noted = box.path.read_bytes()
    for number in range(delivered):
        if number == delivered - 1:
            noted = box.path.read_bytes()
        deliver(box, client, is_stopped=iter([False, True]).__next__)
    box.close()
    path.write_bytes(noted)  # as before the last record
    (file,) = synced(outbox, client)
    assert (file.delivered, file.problem) == (4 - delivered, None)
    assert facts(client.show_job("digits-1")) == [(TrialState.COMPLETED, 3, 30)]


def test_offline_trial_is_recorded_once(outbox: Outbox, client: BsoClient) -> None:
    who = sender(None, key="made-here", url=client.server_url)
    left_by(outbox, who, evaluation(1), evaluation(2, metric=0.95))
    # A process recorded the trial on the server and died before it noted this.
    client.register(who.registration)
    client.record_offline(OfflineTrial(job_id="digits-1", batch_size=32), "made-here")
    (file,) = synced(outbox, client)
    assert (file.delivered, file.problem) == (2, None)
    view = client.show_job("digits-1")
    assert facts(view) == [(TrialState.COMPLETED, 2, 20)]
    assert view.trials[0].origin == "offline"


def test_suspended_trial_stays_suspended(outbox: Outbox, client: BsoClient) -> None:
    begun = dispatched(client)
    preempted = Ending(outcome=TrialState.SUSPENDED)
    left_by(outbox, sender(begun, url=client.server_url), evaluation(1), preempted)
    assert [file.delivered for file in synced(outbox, client)] == [2]
    assert facts(client.show_job("digits-1")) == [(TrialState.SUSPENDED, 1, 10)]


def test_unreachable_server_is_tried_once(outbox: Outbox) -> None:
    server = ContractDouble()
    server.down = True
    paths = {left_by(outbox, sender(trial(n)), evaluation(1)) for n in (1, 2, 3)}
    files = synced(outbox, server.client().with_retries(NO_RETRIES))
    assert {file.path for file in files} == paths
    assert all("Connection refused" in (file.problem or "") and file.left == 1 for file in files)
    assert server.attempts_while_down == 1
    assert set(outbox.waiting()) == paths


def client_answered(status: int, **answer: Any) -> BsoClient:
    """Return a client of a server that accepts reports of trial 2 and answers all other requests with `status`."""

    def answered(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["trial_number"] == 2:
            return httpx.Response(200, json={"stop_train": True, "converged": True, "message": "target reached"})
        return httpx.Response(status, **answer)

    return BsoClient("http://bso", retries=NO_RETRIES, transport=httpx.MockTransport(answered))


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (401, {"json": {"message": "the token is unknown"}}),
        (403, {"json": {"message": "trial 1 was dispatched to another token"}}),
        (404, {"text": "404 page not found"}),
        (302, {"headers": {"location": "https://login.example"}}),
        (200, {"text": "<html>down for maintenance</html>"}),
    ],
    ids=["a refused token", "another token's", "a proxy without its server", "a login page", "a page instead"],
)
def test_temporarily_undeliverable_file_stays_without_blocking_the_next(
    outbox: Outbox, status: int, answer: dict[str, Any]
) -> None:
    first, second = (left_by(outbox, sender(trial(n)), evaluation(1)) for n in (1, 2))
    files = {file.path: file for file in synced(outbox, client_answered(status, **answer))}
    assert (files[first].left, files[first].set_aside) == (1, None)
    assert files[first].problem is not None
    assert files[second].delivered == 1
    assert outbox.waiting() == [first]


def test_unusable_server_does_not_block_deliveries_to_a_second_server(outbox: Outbox) -> None:
    stuck = left_by(outbox, sender(TRIAL, url="embedded:///nowhere"), evaluation(1))
    other = left_by(outbox, sender(trial(2)), evaluation(1))

    def client_of(server_url: str) -> BsoClient:
        if server_url == "http://bso":
            return client_answered(500)
        raise ZeusBSOConfigError("the server is not installed here")

    files = {file.path: file for file in deliver_waiting(outbox, client_of)}
    assert (files[stuck].left, files[stuck].problem) == (1, "the server is not installed here")
    assert files[other].delivered == 1
    assert outbox.waiting() == [stuck]
    outbox.open(stuck).close()  # no process holds the file


def test_results_for_a_different_server_are_left(outbox: Outbox) -> None:
    path = left_by(outbox, sender(TRIAL, url="http://elsewhere"), evaluation(1))
    assert list(deliver_waiting(outbox, lambda _: None)) == []
    assert outbox.waiting() == [path]


def test_interrupted_delivery_continues_at_the_next_result(
    outbox: Outbox, server: ServerProcess, client: BsoClient
) -> None:
    begun = dispatched(client)
    path = left_by(outbox, sender(begun, url=client.server_url), *(evaluation(epoch) for epoch in (1, 2, 3)))
    box = outbox.open(path)
    with pytest.raises(ZeusBSOServerUnreachableError):
        deliver(box, client, is_stopped=lambda: len(box) == 1 and server.kill() is not None)
    assert len(box) == 1
    box.close()
    server.start()
    (file,) = synced(outbox, client)
    assert file.delivered == 1
    assert facts(client.show_job("digits-1")) == [(TrialState.RUNNING, 3, 30)]


# --- the command `zeus-plugins sync` ----------------------------------------------------------------------------------


def sync(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("zeus_plugins", "sync", *arguments, modules=("zeus_plugins.cli", "httpcore"))


def test_sync_delivers_waiting_results(outbox: Outbox, client: BsoClient) -> None:
    trial = dispatched(client)
    left_by(outbox, sender(trial, url=client.server_url), evaluation(1), evaluation(2, metric=0.95))
    what = f"job digits-1 for {client.server_url}"

    dry = sync("--dry-run")
    assert (dry.returncode, dry.stdout, dry.stderr) == (0, f"{what}: 2 waiting\n", "")
    assert facts(client.show_job("digits-1")) == [(TrialState.RUNNING, None, None)]

    done = sync()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{what}: 2 delivered\n", "")
    assert facts(client.show_job("digits-1")) == [(TrialState.COMPLETED, 2, 20)]

    again = sync()
    assert (again.returncode, again.stdout) == (0, f"nothing waits in {outbox.directory}\n")


def test_sync_delivers_to_a_moved_server(outbox: Outbox, client: BsoClient) -> None:
    trial = dispatched(client)
    left_by(outbox, sender(trial, url="http://127.0.0.1:9"), evaluation(1, metric=0.95))
    away = sync()
    assert away.returncode == 1
    assert "1 waiting (no answer from" in away.stdout
    assert away.stderr == (
        "zeus-plugins: some reports could not be delivered, for the causes above: the next sync tries what waits\n"
    )
    assert sync("--server-url", client.server_url).returncode == 0
    assert facts(client.show_job("digits-1")) == [(TrialState.COMPLETED, 1, 10)]


def test_sync_reports_results_set_aside(outbox: Outbox, client: BsoClient, capsys: pytest.CaptureFixture[str]) -> None:
    trial = dispatched(client)
    left_by(outbox, sender(trial, url=client.server_url), evaluation(1))
    client.delete_job("digits-1")
    assert main(["sync"]) == 1
    (aside,) = outbox.refused()
    told, complaint = capsys.readouterr()
    assert "refused (" in told
    assert f"{aside}: set aside" in told
    assert complaint.startswith("zeus-plugins: some reports could not be delivered, for the causes above")
    assert main(["sync"]) == 0


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
    assert "some reports could not be delivered" in complaint
