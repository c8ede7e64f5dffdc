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
def attach(
    user_ns: int, mount_ns: int, fd: int, target: bytes, replaces: bool, device: int, inode: int, /
) -> None: ...
def start_namespaces() -> tuple[int, int]: ...
