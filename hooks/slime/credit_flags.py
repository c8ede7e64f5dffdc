"""What the estimators ask of a host's flags."""

import logging
from argparse import Namespace

from midstream.conf.schema.credit import NEEDS_FORKS, CreditConfig
from midstream.conf.schema.policies import FORKS
from midstream.hooks.slime.settings import layer_of

NOTE_KEY = "round_number"
"""Of the keys that the host carries from a sample's metadata to the trainer, the one that it takes from any sample."""
_HOOK = "midstream.hooks.slime.credit.apply_credit"
_SPREADS_REWARDS = ("grpo", "gspo", "cispo")

_logger = logging.getLogger(__name__)


def takes_notes(args: Namespace) -> bool:
    """Whether the trainer's hook is there to take the notes of samples out again.

    A hook of the user's own is trusted to call ours where an estimator needs it.
    """
    path = getattr(args, "rollout_data_postprocess_path", None)
    return path == _HOOK or (path is not None and layer_of(args).credit.needs_trainer)


def check_credit(args: Namespace) -> None:
    """Raise ValueError where flags of the host contradict the estimators, and warn of what costs more than it says."""
    credit = layer_of(args).credit
    names = ", ".join(credit.estimators)
    if credit.estimators != ["grpo"] and getattr(args, "custom_reward_post_process_path", None) is None:
        raise ValueError(
            f"midstream.credit.estimators {names}: add --custom-reward-post-process-path "
            "midstream.hooks.slime.rewards.post_process"
        )
    if credit.needs_trainer and getattr(args, "rollout_data_postprocess_path", None) is None:
        raise ValueError(
            f"midstream.credit.estimators {names}: add --rollout-data-postprocess-path {_HOOK}; a host without that "
            "flag can do grpo and mask_prefix"
        )
    if takes_notes(args) and getattr(args, "log_multi_turn", False):
        raise ValueError(
            f"--log-multi-turn reads what carries midstream's notes to the trainer: leave it out, or {_HOOK}"
        )
    if credit.advantage not in (None, "grpo"):
        _check_replaces(args, credit)
    _warn(args, credit)


def _check_replaces(args: Namespace, credit: CreditConfig) -> None:
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _SPREADS_REWARDS:
        raise ValueError(
            f"midstream.credit.estimators {credit.advantage} takes the place of rewards spread over the tokens: "
            f"--advantage-estimator {estimator} makes its own; use one of {', '.join(_SPREADS_REWARDS)}, or lag_decay "
            "and prefix_is, which weigh any"
        )
    if getattr(args, "use_opd", False) and getattr(args, "normalize_advantages", False):
        raise ValueError(
            f"midstream.credit.estimators {credit.advantage} cannot tell distillation from rewards after "
            "--normalize-advantages: leave out one of it, --use-opd and that"
        )


def _warn(args: Namespace, credit: CreditConfig) -> None:
    layer = layer_of(args)
    if (
        layer.resume_policy in FORKS
        and layer.policies.anchor.prefix == "trained"
        and not {*NEEDS_FORKS, "state_hash", "mask_prefix"} & set(credit.estimators)
    ):
        _logger.warning(
            "resume_policy %s forks groups, and %s compares a prefix with its own continuations, which takes most of "
            "its gradient: see credit.estimators anchored_shrunk in docs/credit.md",
            layer.resume_policy,
            credit.advantage or "the host",
        )
    # Hosts without that flag, as the local job, have each token's own ratio in their loss.
    if (
        "prefix_is" in credit.estimators
        and "mask_prefix" not in credit.estimators
        and not getattr(args, "use_tis", True)
    ):
        _logger.warning(
            "prefix_is leaves each token's own ratio to the host, and --use-tis is off: what an old policy made may be "
            "more biased than without; add it, or mask_prefix"
        )
