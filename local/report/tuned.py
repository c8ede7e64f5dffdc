"""Which settings of a run were changed while it ran, for what its configuration does not say."""

from dataclasses import dataclass
from pathlib import Path

from midstream.conf.control.strict import ControlError
from midstream.conf.control.tuning import chain_of, has_control


@dataclass(frozen=True)
class Tuned:
    """Of one strategy: a line for each change that its job has taken up, oldest first; `damaged` says what is not."""

    strategy: str
    changes: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def warning(self) -> str:
        """For whoever takes the configuration for all that was set."""
        times = "once" if len(self.changes) == 1 else f"{len(self.changes)} times"
        return f"{self.strategy}: its settings were changed {times} while it ran; they stand below its configuration."


def read_tuned(folder: Path, strategy: str) -> Tuned:
    """What the control files of a run directory say; nothing where there are none."""
    if not has_control(folder):
        return Tuned(strategy)
    try:
        chain = chain_of(folder)
    except ControlError as error:
        return Tuned(strategy, damaged=(f"what was changed while it ran is not known: {error}",))
    taken_up = 0 if chain.acknowledgement is None else chain.acknowledgement.version
    return Tuned(
        strategy,
        tuple(
            f"{change.version}  {change.time}  {change.told}"
            for change in chain.valid
            if change.version <= taken_up
        ),
    )
