def mount(
    user_ns: int,
    mount_ns: int,
    classic: bool,
    directory: bytes,
    lowers: bytes,
    upper: bytes,
    work: bytes,
    part: bytes,
    staging: bytes,
    /,
) -> int: ...
def change(
    user_ns: int, mount_ns: int, target: bytes, device: int, inode: int, how: int, fd: int, /
) -> None: ...
def start_namespaces() -> tuple[int, int]: ...
