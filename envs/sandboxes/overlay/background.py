"""What nobody waits for."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_logger = logging.getLogger(__name__)


class Background:
    """One thread that does what it is given, in order; what fails there is logged."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def run(self, work: Callable[[], object]) -> None:
        try:
            self._thread.submit(_logged, work)
        except RuntimeError:
            # It is closing: what it still has to do asks for more, and does that at once.
            _logged(work)

    def settle(self) -> None:
        """Returns when all that it was given is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Returns when all is done, and what that asked for; nobody else gives it anything any more."""
        self._thread.shutdown()


def _logged(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        _logger.exception("in the background of layers: %s failed", work)
