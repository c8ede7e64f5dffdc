import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from midstream.envs.sandboxes.overlay.layers import Layers
from midstream.envs.sandboxes.overlay.mounts import Mounted
from tests.envs.overlay.conftest import Box


@pytest.fixture
def used(box: Box) -> Box:
    """A sandbox with a few layers, one of them under its feet."""
    for turn in range(3):
        box.run(f"echo {turn} > file{turn}; rm -f README")
        box.snapshot()
    return box


def test_the_list_of_mounts_names_no_layer_of_the_host(used: Box, layers: Layers):
    mounts = used.run("cat /proc/self/mountinfo")
    assert str(layers.places.path) not in mounts
    overlays = [line for line in mounts.splitlines() if " - overlay " in line]
    assert len(overlays) == 1
    assert re.search(r" /workspace /workspace rw,nosuid,nodev.* - overlay overlay ", overlays[0])
    assert re.search(r"upperdir=\d+/upper,workdir=\d+/work,", overlays[0])
    assert len(used.lowers()) == 4


def test_layers_are_out_of_reach(used: Box, layers: Layers):
    used.fails(f"ls {layers.places.path}")
    assert used.run("ls -A /workspace/..; ls -d /workspace/../*/upper 2>/dev/null; true").split() == sorted(
        used.run("ls -A /").split()
    )
    assert used.run("ls -A") == "data\nfile0\nfile1\nfile2\nsrc\n"


@pytest.mark.parametrize(
    "command",
    [
        "umount /workspace",
        "umount -l /workspace",
        "mount -o remount,suid /workspace",
        "mount -t overlay overlay -o lowerdir=/workspace,upperdir=/tmp,workdir=/dev/shm /workspace",
        "mount --bind /tmp /workspace",
        "unshare -Ur umount /workspace",
        "unshare -Urm umount /workspace",
        "unshare -Urm mount -o remount,bind,suid /workspace",
    ],
)
def test_the_mount_cannot_be_changed_from_inside(used: Box, command: str):
    used.fails(command)
    assert used.run("cat file2") == "2\n"


def test_marks_of_layers_cannot_be_forged(used: Box, new_box: Callable[..., Box]):
    used.fails("mknod src/one.py~ c 0 0")
    used.run(
        "python3 - <<'EOF' || true\n"
        "import os\n"
        "os.mkdir('/workspace/made')\n"
        "for path in ('/workspace/src', '/workspace/made', '/workspace/src/one.py'):\n"
        "    for name in ('opaque', 'whiteout', 'redirect', 'metacopy', 'origin'):\n"
        "        for prefix in ('user.overlay.', 'trusted.overlay.'):\n"
        "            try:\n"
        "                os.setxattr(path, prefix + name, b'y')\n"
        "            except OSError:\n"
        "                pass\n"
        "EOF"
    )
    seen = used.run("ls -R src made; cat src/one.py")
    snapshot = used.snapshot()
    assert used.run("ls -R src made; cat src/one.py") == seen
    assert new_box(snapshot).run("ls -R src made; cat src/one.py") == seen


def test_setuid_does_nothing_and_is_kept(used: Box):
    used.run("cp /usr/bin/id mine; chmod 4755 mine")
    used.snapshot()
    assert used.run("stat -c %a mine; ./mine -u") == "4755\n" + used.run("id -u")


def test_what_is_below_the_mount_stays_empty(used: Box, tmp_path: Path):
    # A shell starts in the folder below, and gets to the mount by its path alone.
    used.end_shell()
    used.run("echo above > above")
    assert list(used.files.directory.iterdir()) == []


def test_nothing_is_mounted_where_something_else_is(used: Box, layers: Layers, tmp_path: Path):
    mount = layers.mounts.new_mount(("1",), layers.places.new_live())
    assert used.session.init_pid is not None
    mounted = Mounted(used.session.init_pid)
    try:
        for change in (mounted.cover, mounted.replace):
            with pytest.raises(OSError, match="not what was expected"):
                change(tmp_path.stat(), mount)
    finally:
        os.close(mount)
    assert used.run("cat file2; touch file2") == "2\n"


@pytest.mark.parametrize(
    "closed", ["chmod 0 /workspace/out", "chmod 0 /workspace/out/in", "mv /workspace/out /workspace/moved"]
)
def test_a_shell_that_could_not_enter_again_stays_where_it_is(
    used: Box, new_box: Callable[..., Box], closed: str
):
    used.run(f"mkdir -p out/in; cd out/in; echo 1 > file; {closed}")
    first = used.snapshot()
    used.run("chmod -f 755 /workspace/*/ /workspace/*/in; echo 2 >> file; mkdir new")
    second = used.snapshot()
    used.run("cd /workspace/*/in; echo 3 >> file")
    third = used.snapshot()
    seen = [
        new_box(snapshot).run("cd /workspace; chmod -f 755 out out/in; cat */in/file")
        for snapshot in (first, second, third)
    ]
    assert seen == ["1\n", "1\n2\n", "1\n2\n3\n"]


def test_a_shell_left_behind_cannot_write(used: Box, new_box: Callable[..., Box]):
    used.run("mkdir out; cd out; echo 1 > file; exec 5< file")
    with used.session.stopped() as running:
        snapshot = used.files.harvest(used.files.freeze(used.session.state(), running))
    for write in ("echo 2 >> file", "rm file", "chmod 700 .", "mkdir d", "ln file g", "echo > /dev/fd/5"):
        assert "Read-only file system" in used.fails(write)
    assert used.run("cat file; cat <&5; cd /workspace/out; echo 2 >> file; cat file") == "1\n1\n1\n2\n"
    assert new_box(snapshot).run("cat file; ls -a") == "1\n.\n..\nfile\n"
