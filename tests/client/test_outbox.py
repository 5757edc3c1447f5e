"""Results that wait on disk for a server: no crash at any moment loses or repeats a result."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
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
from tests.support.contract_double import ContractDouble
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
from zeus_plugins.cli import main
from zeus_plugins.client.delivery import Delivered, deliver, deliver_waiting
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox, OutboxFile, OutboxFileError
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


MINE = TRIAL.model_copy(update={"job_id": "digits:1"})  # as a file name equal to "digits@1"


@pytest.mark.parametrize("other", ["server", "job", "trial"])
def test_trials_use_separate_files(outbox: Outbox, other: str) -> None:
    different = {
        "server": sender(MINE, url="http://elsewhere", job_id="digits:1"),
        "job": sender(TRIAL.model_copy(update={"job_id": "digits@1"}), job_id="digits@1"),
        "trial": sender(MINE.model_copy(update={"trial_number": 8}), job_id="digits:1"),
    }[other]
    left_by(outbox, sender(MINE, job_id="digits:1"), THREE[0])
    with closing(outbox.box(different)) as another:
        assert len(another) == 0


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


def test_trial_of_a_dead_training_gets_a_short_lease(outbox: Outbox, client: BsoClient) -> None:
    begun = dispatched(client)
    left_by(outbox, sender(begun, url=client.server_url), evaluation(1))
    synced(outbox, client)
    heard = client.heartbeat(begun, regular=False)
    # instead of the hour for a training without heartbeats
    assert (heard.state, heard.lease_s) == (TrialState.RUNNING, 360)


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


def answering(status: int, **answer: Any) -> BsoClient:
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
    files = {file.path: file for file in synced(outbox, answering(status, **answer))}
    assert (files[first].left, files[first].set_aside) == (1, None)
    assert files[first].problem is not None
    assert files[second].delivered == 1
    assert outbox.waiting() == [first]


def test_unusable_server_does_not_block_deliveries_to_a_second_server(outbox: Outbox) -> None:
    stuck = left_by(outbox, sender(TRIAL, url="embedded:///nowhere"), evaluation(1))
    other = left_by(outbox, sender(trial(2)), evaluation(1))

    def client_of(server_url: str) -> BsoClient:
        if server_url == "http://bso":
            return answering(500)
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
        "zeus-plugins: some reports could not be delivered: remove the cause and run this command again\n"
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
    assert complaint == "zeus-plugins: some reports could not be delivered: a server refused them for good\n"
    assert main(["sync"]) == 0
