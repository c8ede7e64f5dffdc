"""What a comparison tells whoever is watching; the command line draws it, tests may ignore it."""

from collections.abc import Mapping
from typing import Any, Protocol


class Progress(Protocol):
    """Receives the news of `compare`, in this order per strategy: started, steps, finished.

    `alarm` and `note` may come at any time, also from another thread.
    """

    def strategy_started(self, name: str, steps: int) -> None: ...

    def step_finished(
        self,
        name: str,
        step: int,
        reward: float | None,
        tokens_per_s: float | None,
        trainer_wait_fraction: float | None,
    ) -> None:
        """`step` counts from 0; tokens_per_s are model tokens made by the engine per second of this step."""

    def alarm(self, message: str) -> None:
        """Something went wrong and was dealt with, such as a server that had to be restarted."""

    def note(self, message: str) -> None:
        """Something worth knowing that is not wrong, such as a cached warm start."""

    def strategy_finished(self, name: str, run: Mapping[str, Any]) -> None:
        """`run` is the strategy's entry in `runs` of `compare.json`."""

    def close(self) -> None:
        """No more news; safe to call twice."""


class SilentProgress:
    """A Progress that shows nothing."""

    def strategy_started(self, name: str, steps: int) -> None:
        pass

    def step_finished(
        self,
        name: str,
        step: int,
        reward: float | None,
        tokens_per_s: float | None,
        trainer_wait_fraction: float | None,
    ) -> None:
        pass

    def alarm(self, message: str) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def strategy_finished(self, name: str, run: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
