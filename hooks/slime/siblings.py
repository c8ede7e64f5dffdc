"""The members of a host's group, which it plays one by one."""

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from midstream.hooks.slime.settings import siblings_of
from midstream.hooks.turns import Play


def beside_siblings(args: Namespace, sample: Any, play: Play) -> AbstractContextManager[None]:
    """While ``play`` runs for ``sample``: have it stopped when its group is given up, and note how it ended.

    Not where the host gives the rewards of a group at its end, nor where it does not number what it has played.
    """
    if getattr(args, "group_rm", False) or sample.group_index is None or sample.index is None:
        return nullcontext()
    return siblings_of(args).playing(play, sample.index, args.n_samples_per_prompt)
