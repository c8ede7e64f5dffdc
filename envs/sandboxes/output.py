"""Keeps the beginning and the end of a stream of output in bounded memory."""


class BoundedOutput:
    """Takes bytes as they come; holds `limit_bytes` at most, half from the start and half from the end."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes - limit_bytes // 2
        self._tail_bytes = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total_bytes = 0

    @property
    def truncated(self) -> bool:
        return self._total_bytes > self._head_bytes + self._tail_bytes

    def add(self, chunk: bytes) -> None:
        self._total_bytes += len(chunk)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk[-self._tail_bytes :] if self._tail_bytes else b""
            # Trimmed seldom, so that a flood of small writes costs no copy of the tail each.
            if len(self._tail) > 2 * self._tail_bytes:
                del self._tail[: len(self._tail) - self._tail_bytes]

    def text(self) -> str:
        """What was kept, what is not UTF-8 replaced, a gap marked with its number of bytes."""
        tail = self._tail[max(0, len(self._tail) - self._tail_bytes) :]
        left_out = self._total_bytes - len(self._head) - len(tail)
        gap = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
        return (self._head + gap + tail).decode("utf-8", "replace")
