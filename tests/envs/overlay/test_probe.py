import ctypes
from pathlib import Path

from midstream.envs.sandboxes.isolation.base import Isolation
from midstream.envs.sandboxes.isolation.choose import choose_isolation
from midstream.envs.sandboxes.overlay.probe import overlay_fault
from tests.envs.overlay.conftest import Box

PR_GET_DUMPABLE = 3


def test_the_probe_leaves_nothing(tmp_path: Path, overlays: Isolation):
    assert overlay_fault(tmp_path / "root", overlays) is None
    assert list((tmp_path / "root" / "layers").iterdir()) == []


def test_the_probe_names_what_is_missing(tmp_path: Path, overlays: Isolation):
    assert "no namespaces" in str(overlay_fault(tmp_path, choose_isolation("none")))
    assert "/proc/nowhere" in str(overlay_fault(Path("/proc/nowhere"), overlays))


def test_debuggers_and_profilers_still_see_us(box: Box):
    box.run("echo x > x")
    box.snapshot()
    assert ctypes.CDLL(None).prctl(PR_GET_DUMPABLE) == 1
