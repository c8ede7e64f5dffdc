"""Which backend keeps the workspaces of a job: the best one that works here, or the one that was asked for."""

import logging
from functools import partial
from pathlib import Path
from typing import Literal

from midstream.envs.errors import SandboxFailure
from midstream.envs.sandboxes.backend import LocalBackend
from midstream.envs.sandboxes.isolation import Isolation
from midstream.envs.sandboxes.plain import PlainFiles
from midstream.envs.store.store import SnapshotStore

_logger = logging.getLogger(__name__)

BackendName = Literal["auto", "overlay", "store"]


def choose_backend(
    name: BackendName, root: Path, store: SnapshotStore, isolation: Isolation, *, setup_timeout_s: float
) -> LocalBackend:
    """The backend of this name; for `auto` overlay where a real try of it works, else store, and the log says why.

    Raises SandboxFailure where overlay was asked for by name and does not work here.
    """
    fault = None if name == "store" else _overlay_fault(root, isolation)
    if name == "overlay" and fault is not None:
        raise SandboxFailure(
            f"environment.backend='overlay' does not work here: {fault}. Set environment.backend=store, which "
            "works anywhere, or auto",
            "permanent",
        )
    if name == "store" or fault is not None:
        if fault is not None:
            _logger.info("workspaces are plain folders: overlay does not work here: %s", fault)
        return LocalBackend(
            "store",
            root,
            store,
            isolation,
            partial(PlainFiles, store=store, owner=isolation.owner),
            setup_timeout_s=setup_timeout_s,
        )
    from midstream.envs.sandboxes.overlay.files import OverlayFiles
    from midstream.envs.sandboxes.overlay.layers import Layers

    layers = Layers(root / "layers", store, isolation.owner)
    return LocalBackend(
        "overlay",
        root,
        store,
        isolation,
        partial(OverlayFiles, layers=layers),
        forks_by_mount=True,
        setup_timeout_s=setup_timeout_s,
        forget=layers.forget,
        closed=layers.close,
    )


def _overlay_fault(root: Path, isolation: Isolation) -> str | None:
    """Why overlay does not work here; None where it does."""
    try:
        # Not at the top: its module in C is missing where midstream was installed without a compiler.
        from midstream.envs.sandboxes.overlay.probe import overlay_fault
    except ImportError as error:
        return f"{error}; install a C compiler and midstream again"
    return overlay_fault(root, isolation)
