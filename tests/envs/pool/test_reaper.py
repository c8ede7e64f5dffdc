"""What killed processes leave, and that the next start finds all of it and nothing else."""

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.envs.errors import EnvironmentFailure
from midstream.envs.ownership import claims
from midstream.envs.ownership.mounts import mounts_below
from midstream.envs.ownership.owners import Owner, this_process
from midstream.envs.pool.limits import SharedCounts
from midstream.envs.pool.pool import Pool
from midstream.envs.pool.reaper import Reaped, reap
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.marks import MARK
from midstream.envs.sandboxes.protocol import SandboxSpec
from tests.envs.pool.scripted import FolderBackend

KILLS = 100 if os.environ.get("MIDSTREAM_SOAK") else 4
# Its number is that of a process which ended before this one started.
GONE = replace(this_process("gone"), start=this_process().start - 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def temp() -> Path:
    return Path(tempfile.gettempdir())


@contextmanager
def victim(repository: Path, root: Path, shared: Path, temp: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.envs.pool.victim", str(root), str(shared), str(temp)]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "lives\n"
            yield started
        finally:
            started.kill()


def left(root: Path, name: str, owner: Owner = GONE) -> Path:
    """A sandbox's directory of an owner."""
    directory = root / name
    claims.claim(directory, owner.label)
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "file").write_text("content")
    (directory / "deep").chmod(0)
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}


def claim_names(root: Path) -> set[str]:
    return names(claims.claims_of(root))


def removed(reaped: Reaped) -> list[str]:
    """What went of this test's own; other tests' processes may be among what a reaper finds on the machine."""
    return [line for line in reaped.removed if "/test_" in line]


def marked(owner: Owner) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={owner.label}+".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


async def next_start(root: Path, shared: Path, temp: Path, killed: Owner) -> Pool:
    """A job that begins where another one was killed, and ends when all is as if that had never been."""
    backend = FolderBackend(root)
    pool = Pool(backend, PoolSettings(max_sandboxes=12, shared_path=shared, sandbox_root=root))
    leases = await asyncio.gather(*[pool.lease(SandboxSpec()) for _ in range(12)])
    async with asyncio.timeout(30):
        while names(root) != set(backend.live) or names(temp) or marked(killed):
            await asyncio.sleep(0.01)
    for lease in leases:
        await pool.release(lease)
    await pool.close()
    return pool


def test_the_next_start_finds_all_that_a_kill_left_at_any_moment(
    repository: Path, root: Path, tmp_path: Path, temp: Path, loop: asyncio.Runner
) -> None:
    chance = random.Random(4)
    for _ in range(KILLS):
        with victim(repository, root, tmp_path / "shared", temp) as job:
            time.sleep(chance.random() * 0.3)
            job.send_signal(signal.SIGKILL)
            job.wait()
        owners = {each.owner for each in claims.claimed(root)}
        assert [owner.pid for owner in owners if owner] == [job.pid]
        [owner] = owners
        assert owner is not None and marked(owner)
        pool = loop.run(next_start(root, tmp_path / "shared", temp, owner))
        assert pool.metrics()["reaped"] >= 2
        assert names(root) == claim_names(root) == set()
        assert list((claims.claims_of(root) / ".beats").iterdir()) == []


def test_the_reaper_itself_can_be_killed_at_any_moment(root: Path, temp: Path) -> None:
    code = "import sys; from pathlib import Path; from midstream.envs.pool.reaper import reap; print(flush=True); "
    code += "reap([Path(sys.argv[1])], Path(sys.argv[2]))"
    chance = random.Random(5)
    for _ in range(KILLS):
        for number in range(40):
            left(root, f"sandbox{number}")
            folder = temp / f"midstream-{GONE.label}-{number}"
            (folder / "inside").mkdir(parents=True)
        with subprocess.Popen([sys.executable, "-c", code, root, temp], stdout=subprocess.PIPE) as reaper:
            assert reaper.stdout is not None
            reaper.stdout.readline()
            time.sleep(chance.random() * 0.03)
            reaper.kill()
        reap([root], temp)
        assert names(root) == claim_names(root) == names(temp) == set()


def test_two_reapers_at_once_do_no_harm(root: Path, temp: Path) -> None:
    code = "import sys; from pathlib import Path; from midstream.envs.pool.reaper import reap; sys.stdin.readline(); "
    code += "reaped = reap([Path(sys.argv[1])], Path(sys.argv[2])); print(reaped.sandboxes, *reaped.failed)"
    for number in range(60):
        left(root, f"sandbox{number}")
    alive = left(root, "alive", this_process())
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([sys.executable, "-c", code, root, temp], stdin=pipe, stdout=pipe, text=True)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        said = [out for out, _ in threads.map(lambda reaper: reaper.communicate("\n"), both)]
    assert sum(int(line) for line in said) == 60
    assert names(root) == claim_names(root) == {alive.name}


def test_what_has_a_living_owner_stays_and_a_second_run_finds_nothing(root: Path, temp: Path) -> None:
    alive, gone = left(root, "alive", this_process()), left(root, "gone")
    folder = Path(tempfile.mkdtemp(prefix=claims.temp_prefix("engine")))
    (temp / f"midstream-engine-{GONE.label}-abc").mkdir()
    (temp / "midstream-of-somebody").mkdir()
    planned = reap([root], temp, dry_run=True)
    assert gone.exists() and planned.sandboxes == planned.folders == 1
    reaped = reap([root], temp)
    assert (
        removed(reaped) == removed(planned) == [str(gone), str(temp / f"midstream-engine-{GONE.label}-abc")]
    )
    assert names(root) == {"alive"} and names(temp) == {folder.name, "midstream-of-somebody"}
    assert alive.exists() and not reaped.failed
    assert removed(reap([root], temp)) == []


def test_a_claim_without_a_directory_goes_and_a_directory_without_a_claim_stays(
    root: Path, temp: Path
) -> None:
    claims.claim(root / "never-made", GONE.label)
    (root / "not-ours").mkdir()
    reap([root], temp)
    assert claim_names(root) == set() and names(root) == {"not-ours"}


def test_claims_say_whose_a_directory_is_and_refuse_another_owner(root: Path) -> None:
    ours = this_process().label
    claims.claim(root / "one", ours)
    claims.claim(root / "one", ours)
    with pytest.raises(EnvironmentFailure, match=f"belongs to {ours}, not to {GONE.label}"):
        claims.claim(root / "one", GONE.label)
    with pytest.raises(EnvironmentFailure, match="'me' is no owner's label"):
        claims.claim(root / "two", "me")
    assert claims.leftovers(root) == []
    claims.release(root / "one")
    claims.claim(root / "one", GONE.label)
    assert claims.leftovers(root) == [root / "one"]


def test_owners_elsewhere_are_left_alone_until_they_have_been_silent(
    root: Path, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = replace(this_process(), host="elsewhere")
    directory = left(root, "away", away)
    reaped = reap([root], temp)
    assert directory.exists() and any(f"{directory}: whether" in line for line in reaped.skipped)
    monkeypatch.setattr(claims, "SILENT_S", 0.0)
    # It has never said that it lives, as a pool does: nothing follows from its silence.
    assert removed(reap([root], temp)) == []
    claims.beat(root, away.label)
    monkeypatch.setattr(claims, "SILENT_S", 900.0)
    assert removed(reap([root], temp)) == []
    os.utime(claims.claims_of(root) / ".beats" / away.label, (1, 1))
    assert reap([root], temp).sandboxes == 1
    assert not directory.exists() and not (claims.claims_of(root) / ".beats" / away.label).exists()


def test_owners_of_an_earlier_boot_are_gone_where_the_disk_is_this_hosts(
    root: Path, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = left(root, "before", replace(this_process(), boot="0" * 8))
    monkeypatch.setattr(claims, "is_local", lambda _: False)
    assert removed(reap([root], temp)) == []
    monkeypatch.setattr(claims, "is_local", lambda _: True)
    assert reap([root], temp).sandboxes == 1 and not directory.exists()


def mount(*arguments: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    source, target, kind = (argument.encode() for argument in arguments)
    flags = 4096 if kind == b"bind" else 0
    if libc.mount(source, target, kind, flags, None):
        pytest.skip(f"this machine allows no mounts: {os.strerror(ctypes.get_errno())}")


def test_mounts_are_taken_away_and_what_is_mounted_is_not_removed(
    root: Path, temp: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    directory = left(root, "mounted")
    (directory / "a").mkdir()
    (directory / "a b\n").mkdir()
    mount(str(precious), str(directory / "a"), "bind")
    mount("tmpfs", str(directory / "a b\n"), "tmpfs")
    # Somebody works in it.
    with subprocess.Popen(["sleep", "60"], cwd=directory / "a b\n") as busy:
        try:
            reaped = reap([root], temp)
        finally:
            busy.kill()
    assert reaped.mounts == 2 and not reaped.failed
    assert mounts_below(root) == [] and names(root) == set()
    assert (precious / "file").read_text() == "kept"


def test_what_cannot_be_unmounted_is_left_whole_and_said(
    root: Path, temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = left(root, "mounted")
    monkeypatch.setattr("midstream.envs.pool.reaper.mounts_below", lambda path: [f"{path}/inside"])
    reaped = reap([root], temp)
    assert reaped.failed == [f"{directory}: something is still mounted in it"]
    assert directory.exists() and claims.leftovers(root) == [directory]


def test_what_could_not_be_removed_is_tried_again(
    root: Path, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(root, "stubborn")

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with monkeypatch.context() as refusing:
        refusing.setattr("midstream.envs.pool.reaper.remove_tree", refuse)
        assert reap([root], temp).failed == [f"{root / 'stubborn'}: Operation not permitted"]
    assert names(root) == claim_names(root) != set()
    assert reap([root], temp).sandboxes == 1
    assert names(root) == claim_names(root) == set()


def test_processes_of_a_dead_owner_end_and_no_others(root: Path, temp: Path) -> None:
    def start(label: str | None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **({} if label is None else {MARK: f"{label}+abc"})}
        # It does not end when it is asked to.
        return subprocess.Popen(
            ["bash", "-c", "trap '' TERM HUP; sleep 60; :"], env=environment, start_new_session=True
        )

    labels = [GONE.label, this_process().label, None, "no-label"]
    started = [start(label) for label in labels]
    try:
        reaped = reap([root], temp)
        assert started[0].wait(10) == -signal.SIGKILL
        assert reaped.processes >= 1 and f"process {started[0].pid}" in reaped.removed
        assert [process.poll() for process in started[1:]] == [None, None, None]
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_what_another_user_owns_is_skipped_and_said(root: Path, temp: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make what belongs to another user")
    folder = temp / f"midstream-{GONE.label}-abc"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    (root / ".claims-12345").mkdir()
    os.chown(root / ".claims-12345", 12345, 12345)
    (root / ".claims-12345" / "theirs").symlink_to(GONE.label)
    (root / "theirs").mkdir()
    reaped = reap([root], temp)
    assert folder.exists() and (root / "theirs").exists()
    assert any("belongs to user 12345" in line for line in reaped.skipped)
    assert any("1 sandboxes" in line and "user 12345" in line for line in reaped.skipped)


def test_a_claims_directory_that_another_user_planted_is_not_believed(root: Path, temp: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make what belongs to another user")
    (root / "precious").mkdir()
    claims.claim(root / "precious", GONE.label)
    os.chown(claims.claims_of(root), 12345, 12345)
    reap([root], temp)
    assert (root / "precious").exists()


def test_layers_of_a_killed_job_go_and_those_of_a_living_one_stay(root: Path, temp: Path) -> None:
    places = pytest.importorskip("midstream.envs.sandboxes.overlay.places")
    code = (
        "import sys, time; from pathlib import Path; from midstream.envs.sandboxes.overlay.places import *; "
    )
    code += "places = LayerPlaces(Path(sys.argv[1])); places.new_live(); print(flush=True); time.sleep(60)"
    ours = places.LayerPlaces(root / "layers")
    with subprocess.Popen([sys.executable, "-c", code, root / "layers"], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        assert removed(reap([root], temp)) == []
        job.kill()
        job.wait()
    planned = reap([root], temp, dry_run=True)
    assert planned.layers == 1 and len(list((root / "layers").glob("*.lock"))) == 2
    assert removed(reap([root], temp)) == removed(planned) != []
    assert names(root / "layers") == {ours.path.name, f"{ours.path.name}.lock"}
    ours.close()


def test_slots_of_a_killed_job_are_free_for_the_next(
    repository: Path, root: Path, temp: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    with victim(repository, root, shared, temp) as job:
        job.kill()
        job.wait()
        next_job = SharedCounts(shared, this_process(), 12)
        assert all(next_job.take() for _ in range(12)) and not next_job.take()
    reap([root], temp)


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are made by root")
def test_layers_of_another_user_do_not_keep_ones_own(root: Path) -> None:
    folder = root / "layers"
    for name in ("1-own", "2-foreign"):
        (folder / name).mkdir(parents=True)
        (folder / f"{name}.lock").touch()
    os.chown(folder / "2-foreign.lock", 1234, 1234)
    reaped = reap([root], None)
    assert reaped.layers == 1 and not reaped.failed
    assert any("user 1234" in line for line in reaped.skipped)
    assert names(folder) == {"2-foreign", "2-foreign.lock"}
