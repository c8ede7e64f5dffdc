"""Files that are there whole or not at all, also after a power cut."""

import os
from pathlib import Path

from midstream.envs.store.packs import sync_directory


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in place of the one that may be there; its folder exists. Raises OSError, and leaves that one."""
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        # What did not fit on a disk must not keep it full.
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
