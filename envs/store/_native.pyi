from collections.abc import Sequence

from midstream.envs.store.listing import Compared, Directory

def compare(
    root_fd: int,
    directories: Sequence[Directory],
    settled_ns: int,
    max_entries: int,
    distrusted: bytes,
    threads: int,
) -> list[Compared | int]: ...
def open_beneath(root_fd: int, path: bytes, flags: int, mode: int = 0) -> int: ...
