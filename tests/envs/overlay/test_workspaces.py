import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.envs.errors import RestoreMismatch
from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.overlay.stacks import LayerBudget
from midstream.envs.store.store import SnapshotStore
from tests.envs.overlay.conftest import SPEC, Box

TURNS = [
    "echo more >> src/one.py; rm data/a; mkdir empty",
    "rm -r src/deep; mkdir src/deep; echo new > src/deep/four.py",
    "mv data moved; ln -s ../README moved/link; ln README hard",
    "chmod 750 src; chmod 4711 src/two.py; chmod 1777 empty; chmod 700 .",
    "rm README; mkdir README; echo in > README/a",
    "rm -r README; echo file > README; ln moved/b second; mkfifo pipe",
    "echo changed >> second; rm hard; touch 'a\nb' $'\\xff'; mv src renamed; mv renamed/two.py .",
    "setfattr -n user.note -v text two.py 2>/dev/null; truncate -s 1M sparse; rm -rf -- * ; echo last > last",
]


def digest_of_copy(box: Box, store: SnapshotStore, tmp_path: Path) -> str:
    return store.put(box.copy(tmp_path / f"copy{random.getrandbits(64):x}")).digest


def test_the_shell_lives_through_a_snapshot(box: Box):
    box.run("cd src; value=5; export SEEN=yes; f() { echo f$value; }; cd deep; echo edit >> three.py")
    before = box.session.init_pid
    box.snapshot()
    assert box.session.init_pid == before
    assert box.run("f; echo $PWD $OLDPWD $SEEN; cat three.py; cd -") == (
        "f5\n/workspace/src/deep /workspace/src yes\n3\nedit\n/workspace/src\n"
    )
    assert box.run("echo again >> one.py; cat one.py; ls /workspace") == "1\nagain\nREADME\ndata\nsrc\n"


def test_snapshots_have_the_digest_of_a_plain_copy(box: Box, store: SnapshotStore, tmp_path: Path):
    for turn in TURNS:
        box.run(f"cd /workspace; {turn}")
        snapshot = box.snapshot()
        assert snapshot.digest == digest_of_copy(box, store, tmp_path), turn


def test_changes_and_parents_are_those_of_each_turn(box: Box):
    box.run("echo 1 > new; rm data/a")
    first = box.snapshot()
    box.run("echo 2 > new; mkdir data/c")
    second = box.snapshot()
    assert [(change.path, change.kind) for change in first.changes if change.path != "data"] == [
        ("data/a", "deleted"),
        ("new", "created"),
    ]
    assert ("new", "modified") in [(change.path, change.kind) for change in second.changes]
    assert second.parent == first.id


@pytest.mark.parametrize("seed", range(3))
def test_random_edits_are_kept(new_box: Callable[..., Box], store: SnapshotStore, tmp_path: Path, seed: int):
    rng = random.Random(seed)
    names = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "f/a"]
    edits = [
        "mkdir -p $(dirname {0}); echo {2} > {0}",
        "rm -rf {0}",
        "rm -rf {0}; mkdir -p {0}; echo {2} > {0}/in",
        "mv -T {0} {1}",
        "rm -rf {1}; ln {0} {1}",
        "rm -rf {1}; ln -s x{2} {1}",
        "chmod {3} {0}",
        "echo {2} >> {0}",
    ]
    box = new_box()
    taken: list[Snapshot] = []
    for _ in range(6):
        lines = [
            rng.choice(edits).format(
                rng.choice(names), rng.choice(names), rng.randrange(99), rng.choice(["700", "755", "2750"])
            )
            for _ in range(12)
        ]
        box.run("cd /workspace; { " + "; ".join(lines) + "; } 2>/dev/null; true")
        taken.append(box.snapshot())
        assert taken[-1].digest == digest_of_copy(box, store, tmp_path), lines
    for snapshot in rng.sample(taken, 3):
        fork = new_box(snapshot)
        assert digest_of_copy(fork, store, tmp_path) == snapshot.digest


def test_forks_do_not_see_each_other(new_box: Callable[..., Box], box: Box):
    box.run("cd src; echo common >> one.py; export A=1")
    snapshot = box.snapshot()
    forks = [new_box(snapshot) for _ in range(3)]
    for number, fork in enumerate(forks):
        assert fork.run("pwd; echo $A") == "/workspace/src\n1\n"
        fork.run(f"echo {number} >> one.py; rm two.py; mkdir mine{number}")
    assert len({fork.snapshot().digest for fork in forks}) == 3
    for number, fork in enumerate(forks):
        assert fork.run("cat one.py; ls") == f"1\ncommon\n{number}\ndeep\nmine{number}\none.py\n"
    assert box.run("cat one.py; ls") == "1\ncommon\ndeep\none.py\ntwo.py\n"


def test_nothing_new_is_the_last_snapshot(box: Box):
    box.run("echo x > x")
    snapshot = box.snapshot()
    assert box.snapshot() is snapshot
    box.run("cat x; ls -R > /dev/null")
    assert box.snapshot() is snapshot
    box.run("export NEW=1")
    other = box.snapshot()
    assert (other.id != snapshot.id, other.digest, other.changes) == (True, snapshot.digest, ())


def test_what_a_dead_shell_wrote_is_there(box: Box, new_box: Callable[..., Box]):
    box.run("echo 1 > kept")
    box.end_shell()
    snapshot = box.snapshot()
    assert box.run("echo 2 >> kept; cat kept") == "1\n2\n"
    box.end_shell()
    assert box.run("cat kept; rm kept; ls") == "1\n2\nREADME\ndata\nsrc\n"
    assert new_box(snapshot).run("cat kept") == "1\n"


def test_the_workspace_is_open_to_us_with_and_without_a_shell(box: Box, tmp_path: Path):
    assert (box.copy(tmp_path / "before") / "README").read_text() == "read\n"
    box.run("echo changed > README")
    assert (box.copy(tmp_path / "during") / "README").read_text() == "changed\n"
    box.end_shell()
    assert (box.copy(tmp_path / "after") / "README").read_text() == "changed\n"


def test_a_background_process_keeps_its_files(box: Box, new_box: Callable[..., Box]):
    box.run("echo start > log; sleep 0.1")
    box.snapshot()
    box.run("while sleep 0.01; do echo line >> log; done & exec 5> held; wait=$!; sleep 0.2")
    first = box.snapshot()
    box.run("rm -f gone; touch gone; echo to-held >&5; sleep 0.1")
    second = box.snapshot()
    box.run("rm gone; kill $wait; wait $wait; exec 5>&-; echo end >> log; true")
    third = box.snapshot()
    assert (second.parent, third.parent) == (first.id, second.id)
    assert {change.path for change in third.changes} == {"gone", "log"}
    assert new_box(first).run("tail -n 1 log; cat held") == "line\n"
    assert new_box(second).run("ls; cat held") == "README\ndata\ngone\nheld\nlog\nsrc\nto-held\n"
    assert new_box(third).run("tail -n 1 log; ls") == "end\nREADME\ndata\nheld\nlog\nsrc\n"


def test_a_file_that_the_shell_holds_open_is_written_on(box: Box, new_box: Callable[..., Box]):
    box.run("exec 5> open; echo 1 >&5")
    first = box.snapshot()
    box.run("echo 2 >&5")
    second = box.snapshot()
    box.run("exec 5>&-; echo 3 >> open")
    third = box.snapshot()
    contents = [new_box(snapshot).run("cat open") for snapshot in (first, second, third)]
    assert contents == ["1\n", "1\n2\n", "1\n2\n3\n"]


def test_two_hundred_snapshots_stay_shallow(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore, tmp_path: Path
):
    layers = new_layers(compact_at=10)
    box = new_box(of=layers)
    taken: list[Snapshot] = []
    for turn in range(200):
        box.run(
            f"cd /workspace; echo {turn} >> log; rm -rf d; mkdir d; echo {turn} > d/{turn}; echo > {turn % 7}"
        )
        taken.append(box.snapshot())
    layers.settle()
    box.run("echo end >> log")
    box.snapshot()
    assert len(box.lowers()) < 12
    for turn in (0, 9, 50, 123, 199):
        fork = new_box(taken[turn], of=layers)
        assert fork.run("wc -l < log; ls d") == f"{turn + 1}\n{turn}\n"
        assert digest_of_copy(fork, store, tmp_path) == taken[turn].digest


def test_other_layers_restore_from_the_store(
    box: Box,
    new_layers: Callable[..., Layers],
    new_box: Callable[..., Box],
    store: SnapshotStore,
    tmp_path: Path,
):
    taken = []
    for turn in TURNS[:5]:
        box.run(f"cd /workspace; {turn}")
        taken.append(box.snapshot())
    elsewhere = new_layers()
    for snapshot in (taken[3], taken[4], taken[0]):
        fork = new_box(snapshot, of=elsewhere)
        assert digest_of_copy(fork, store, tmp_path) == snapshot.digest
    # The next turn there is as good as one here.
    fork.run("rm -r src; echo x > x")
    assert fork.snapshot().digest == digest_of_copy(fork, store, tmp_path)


def test_a_restore_elsewhere_writes_what_differs_from_the_base(
    box: Box, new_layers: Callable[..., Layers], store: SnapshotStore, tmp_path: Path
):
    box.run("rm -r data; echo more >> README")
    snapshot = replace(box.snapshot(), parent=None)
    elsewhere = new_layers()
    known = elsewhere.of(snapshot, SPEC)
    top = elsewhere.places.workspace(known.stack[-1])
    assert (len(known.stack), sorted(path.name for path in top.iterdir())) == (2, ["README", "data"])
    again = elsewhere.of(snapshot, SPEC)
    assert again.stack == known.stack
    elsewhere.release(known.stack)
    elsewhere.release(again.stack)


def test_a_collection_takes_nothing_from_live_sandboxes(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], store: SnapshotStore, tmp_path: Path
):
    layers = new_layers(compact_at=4)
    box = new_box(of=layers)
    box.run("echo 0 > file; rm data/a")
    last = box.snapshot()
    for turn in range(1, 9):
        store.collect()
        assert last not in store
        box.run(f"cd /workspace; echo {turn} >> file; rm -rf src; echo {turn} > new{turn}")
        snapshot = box.snapshot()
        assert snapshot.parent == last.id
        assert {change.path for change in snapshot.changes} >= {"file", f"new{turn}"}
        assert ("src" in {change.path for change in snapshot.changes}) == (turn == 1)
        last = snapshot
        if turn % 2:
            # Otherwise the collection comes before, or into, a compaction.
            layers.settle()
    layers.settle()
    assert len(new_box(last, of=layers).lowers()) < 8
    assert digest_of_copy(new_box(last, of=layers), store, tmp_path) == last.digest
    assert digest_of_copy(new_box(last, of=new_layers()), store, tmp_path) == last.digest


def test_a_restore_that_does_not_match_is_refused(
    box: Box, new_layers: Callable[..., Layers], new_box: Callable[..., Box]
):
    box.run("echo x > x")
    snapshot = replace(box.snapshot(), digest="0" * 64)
    with pytest.raises(RestoreMismatch, match="0000"):
        new_box(snapshot, of=new_layers())


def test_layers_beyond_the_budget_go_and_come_back(
    new_layers: Callable[..., Layers], new_box: Callable[..., Box], tmp_path: Path
):
    layers = new_layers(budget=LayerBudget(layers=4))
    taken = []
    for number in range(8):
        box = new_box(of=layers)
        box.run(f"echo {number} > number")
        taken.append(box.snapshot())
        box.close()
    layers.settle()
    kept = [path for path in layers.places.path.iterdir() if (path / "layer" / "workspace").exists()]
    assert len(kept) <= 4
    assert [new_box(snapshot, of=layers).run("cat number") for snapshot in taken] == [
        f"{number}\n" for number in range(8)
    ]


def test_a_base_is_written_once(new_box: Callable[..., Box], layers: Layers):
    boxes = [new_box() for _ in range(3)]
    assert len({box.snapshot().id for box in boxes}) == 1
    bases = [path for path in layers.places.path.iterdir() if (path / "layer" / "workspace").exists()]
    assert len(bases) == 1


def test_freezing_runs_ahead_of_harvesting(box: Box, new_box: Callable[..., Box], loop: asyncio.Runner):
    frozen = []
    for number in range(4):
        box.run(f"cd /workspace; echo {number} > n; echo {number} > n{number}; sync")
        with box.session.stopped() as running:
            frozen.append(box.files.freeze(box.session.state(), running))
        loop.run(box.session.reenter())
    last = box.files.harvest(frozen[3])
    snapshots = [box.files.harvest(one) for one in frozen]
    assert snapshots[3] is last
    assert [later.parent for later in snapshots[1:]] == [earlier.id for earlier in snapshots[:-1]]
    assert [new_box(one).run("cat n; ls n*") for one in snapshots[:2]] == ["0\nn\nn0\n", "1\nn\nn0\nn1\n"]


def test_a_shell_too_deep_to_tell_its_place_keeps_its_mount(box: Box, new_box: Callable[..., Box]):
    deep = "d" * 100
    box.run(f"for i in $(seq 45); do mkdir {deep} && cd {deep}; done; echo kept > file")
    snapshot = box.snapshot()
    assert box.run("cat file") == "kept\n"
    found = new_box(snapshot).run("cd -P . && find . -name file | wc -c")
    assert int(found) > 45 * 101


def test_an_earlier_time_is_kept_beside_a_background_process(box: Box, new_box: Callable[..., Box]):
    box.run("sleep 60 & echo 1 > x")
    first = box.snapshot()
    assert box.snapshot() == first
    box.run("touch -d 2001-01-01T00:00Z x README")
    second = box.snapshot()
    assert (second.id != first.id, second.digest, second.parent) == (True, first.digest, first.id)
    box.run("kill %1; wait; true")
    assert new_box(second).run("stat -c %Y x README") == "978307200\n978307200\n"
