"""Settings that are changed while the job runs, for the parts of a process that go by them."""

import logging
import threading
from collections.abc import Callable

from midstream.conf.control.job import Control
from midstream.conf.schema import LayerConfig

_logger = logging.getLogger(__name__)


class Steering:
    """Which settings are in force, and who is told when `midstream tune` has changed them.

    Threads may use it at once; what subscribes is called in the thread that polls.
    """

    def __init__(self, layer: LayerConfig) -> None:
        """``layer`` is the job's own configuration; changes of an earlier start of the job are in force at once."""
        assert layer.run_dir is not None  # every job's layer names one
        self._control = Control(layer.run_dir, layer)
        self._subscribers: list[Callable[[LayerConfig], None]] = []
        self._lock = threading.RLock()
        self._read()

    def layer(self) -> LayerConfig:
        """The settings in force, as of the last poll."""
        return self._settled.layer

    def subscribe(self, on_change: Callable[[LayerConfig], None]) -> None:
        """Call ``on_change`` with the settings in force: now, and whenever they have changed."""
        with self._lock:
            self._subscribers.append(on_change)
            on_change(self.layer())

    def unsubscribe(self, on_change: Callable[[LayerConfig], None]) -> None:
        """Call it no more."""
        with self._lock:
            self._subscribers = [each for each in self._subscribers if each != on_change]

    def poll(self, step: int) -> None:
        """Take up what was changed, at this step of the host, and tell whoever waits for it.

        Files that cannot be used change nothing and are logged as errors, each once.
        """
        with self._lock:
            self._read()
            if self._settled.changed:
                _logger.info("settings of version %d are in force from step %d", self._settled.version, step)
                for on_change in self._subscribers:
                    on_change(self.layer())
            # Said when it is true of all parts.
            self._control.acknowledge(step)

    def metrics(self) -> dict[str, float]:
        """The version in force, 0 for the job's own settings; control files that were refused since its start."""
        return {
            "control/version": float(self._settled.version),
            "control/refused": float(self._control.refusals),
        }

    def _read(self) -> None:
        self._settled = self._control.read()
        for alarm in self._settled.alarms:
            _logger.error("%s", alarm)
