"""Control files that cannot be used, and disks that fail: nothing changes, and somebody is told."""

import errno
import os
from pathlib import Path

import pytest

from midstream.conf.control.changes import path_of
from midstream.conf.control.job import Control
from midstream.conf.control.strict import LARGEST_BYTES, ControlError
from midstream.conf.control.tuning import chain_of, commit
from tests.conf.tuned import control_of, proposed, tuned, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def control(run: Path) -> Control:
    return control_of(run)


def test_what_cannot_be_used_changes_nothing_and_is_said_once(run: Path, control: Control) -> None:
    tuned(run, "bounds.token=8")
    control.read()
    good = path_of(run, 1).read_bytes()
    write(run, 2, good)
    write(
        run,
        3,
        good.replace(b'"version": 1', b'"version": 3').replace(b'"bounds.token": 8', b'"bounds.token": -8'),
    )
    write(
        run,
        4,
        good.replace(b'"version": 1', b'"version": 4').replace(b'"bounds.token": 8', b'"max_attempts": 8'),
    )
    write(run, 5, good[:-9])
    write(run, 6, b" " * LARGEST_BYTES + b"{}")
    write(run, 999_999, b"")
    for name in ("7.json", "0000007.json", "000000.json", "-00001.json", "٠٠٠٠٠٧.json", "a\nb.json"):
        (run / "control" / name).write_bytes(good)
    (run / "control" / "notes.txt").write_text("not ours")
    settled = control.read()
    assert (settled.version, settled.changed, settled.layer.bounds.token) == (1, False, 8)
    said = {alarm.partition(" changes nothing: ")[0].rpartition("/")[2]: alarm for alarm in settled.alarms}
    assert len(said) == len(settled.alarms) == control.refusals == 12
    assert "it says that it is version 1" in said["000002.json"]
    assert "bounds.token: got -8; use 0 or more" in said["000003.json"]
    assert "max_attempts is no setting that can be changed" in said["000004.json"]
    assert "it is not sound JSON" in said["000005.json"]
    assert "more than 1,048,576 bytes" in said["000006.json"]
    assert "no change has such a name" in said["a\\nb.json"]
    assert all("`midstream tune`" in alarm and "\n" not in alarm for alarm in said.values())
    assert control.read().alarms == ()


def test_a_draft_that_a_killed_job_has_left_is_no_change(run: Path, control: Control) -> None:
    (run / "control" / ".acknowledged.json").write_bytes(b'{"version": ')
    assert control.read().alarms == () and control.refusals == 0


def test_a_file_that_is_mended_is_taken_up(run: Path, control: Control) -> None:
    change = proposed(run, "bounds.token=8")
    path = write(run, 1, change.encoded()[:-9])
    assert len(control.read().alarms) == 1
    path.write_bytes(change.encoded())
    assert control.read().layer.bounds.token == 8


def test_the_next_change_goes_past_what_cannot_be_used(run: Path, control: Control) -> None:
    write(run, 1, b"half")
    write(run, 999_999, b"half")
    assert tuned(run, "bounds.token=8").version == 2
    assert control.read().version == 2


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "dangling", "device", "socket"])
def test_what_is_no_file_is_not_waited_for(run: Path, control: Control, kind: str) -> None:
    path = path_of(run, 1)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    else:
        path.symlink_to({"loop": path.name, "dangling": "nowhere", "device": "/dev/zero"}[kind])
    settled = control.read()
    assert (settled.version, len(settled.alarms)) == (0, 1)
    assert "cannot be read" in settled.alarms[0]
    assert control.read().alarms == ()
    assert tuned(run, "bounds.token=8").version == 2
    assert control.read().version == 2


def test_what_could_not_be_read_is_tried_again(
    run: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(run, "bounds.token=8")

    def disk_fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("midstream.conf.control.strict.read_file", disk_fails)
        assert len(control.read().alarms) == 1
    assert control.read().version == 1


def test_what_is_in_force_outlasts_its_files(run: Path, control: Control) -> None:
    tuned(run, "bounds.token=8")
    tuned(run, "bounds.token=9")
    assert control.read().version == 2
    control.acknowledge(0)
    write(run, 2, b"")
    assert (control.read().version, control.read().layer.bounds.token) == (2, 9)
    for path in (run / "control").iterdir():
        path.unlink()
    (run / "control").rmdir()
    settled = control.read()
    assert (settled.version, settled.layer.bounds.token, settled.alarms) == (2, 9, ())
    control.acknowledge(1)
    assert control.read().alarms == ()
    control = control_of(run)
    assert tuned(run, "bounds.token=7").version == 3


def test_a_folder_that_cannot_be_used_is_said_and_stops_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "control").write_text("in the way")
    control = control_of(run)
    alarms = control.read().alarms
    assert len(alarms) == 2 and "nobody can tune this job" in alarms[0] and "mend access" in alarms[1]
    control.acknowledge(1)
    assert ["whoever tunes waits in vain" in alarm for alarm in control.read().alarms] == [True]


def test_a_run_without_a_sound_configuration_says_so(run: Path, control: Control) -> None:
    (run / "control" / "base.json").write_text("{")
    with pytest.raises(
        ControlError, match=r"base.json: it is not sound JSON .* the job writes it when it starts"
    ):
        chain_of(run)
    (run / "control" / "base.json").unlink()
    with pytest.raises(ControlError, match=r"base.json: it cannot be read"):
        chain_of(run)


def test_where_nothing_can_be_written_nothing_is_left(
    run: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted((run / "control").iterdir())
    change = proposed(run, "bounds.token=8")

    def disk_is_full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(ControlError, match=r"cannot write .*000001.json \(No space left on device\)"):
        commit(run, change)
    assert sorted((run / "control").iterdir()) == before


def test_a_server_that_made_the_link_and_lost_its_answer_is_no_rival(
    run: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def asked_twice(source: str, target: str, **options: bool) -> None:
        link(source, target, **options)
        link(source, target, **options)

    monkeypatch.setattr("os.link", asked_twice)
    assert tuned(run, "bounds.token=8").version == 1
    assert control.read().version == 1
