"""Who gets credit for what: the settings of its measurement."""

from midstream.conf.schema.base import Section


class CreditConfig(Section):
    """Who gets credit for what."""

    keep_rollouts: bool = True
    """Whether the run directory keeps a line for each rollout that was trained on, which `midstream blame` reads."""
