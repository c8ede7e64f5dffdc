"""What the estimators ask of a host's flags."""

import logging
from argparse import Namespace

from midstream.conf.schema.credit import NEEDS_FORKS, CreditConfig
from midstream.conf.schema.policies import FORKS
from midstream.hooks.slime.settings import layer_of

NOTE_KEY = "round_number"
"""Of the keys that the host carries from a sample's metadata to the trainer, the one that it takes from any sample."""
_HOOK = "midstream.hooks.slime.credit.apply_credit"
# Hosts centre rewards in their groups under these, and divide by the deviation under all but the last.
_CENTRES = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
# Each token's own advantage counts; gspo's ratio is one for the sequence, whose tokens then share one mean advantage.
_SPREADS_REWARDS = ("grpo", "cispo")

_logger = logging.getLogger(__name__)


def takes_notes(args: Namespace) -> bool:
    """Whether the trainer's hook is there to take the notes of samples out again.

    A hook of the user's own is trusted to call ours where an estimator needs it.
    """
    path = getattr(args, "rollout_data_postprocess_path", None)
    return path == _HOOK or (path is not None and layer_of(args).credit.needs_trainer)


def centres_rewards(args: Namespace) -> bool:
    """Whether the host would subtract the mean of a group from its rewards."""
    return getattr(args, "rewards_normalization", True) and _estimator(args) in _CENTRES


def divides_rewards(args: Namespace) -> bool:
    """Whether it would divide them by their deviation, too."""
    divides = getattr(args, "grpo_std_normalization", True) and _estimator(args) in _CENTRES[:-1]
    return centres_rewards(args) and divides


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
    if credit.needs_trainer and _estimator(args) == "gspo":
        raise ValueError(
            f"midstream.credit.estimators {names}: under --advantage-estimator gspo all tokens of a sample share the "
            "mean of their advantages; use grpo or cispo, or the estimators grpo and mask_prefix"
        )
    if "prefix_is" in credit.estimators and not _computes_log_probs(args):
        raise ValueError(
            "midstream.credit.estimators prefix_is needs log-probs that the trainer computes before its loss: add "
            "--use-tis --get-mismatch-metrics --custom-tis-function-path "
            "slime.backends.megatron_utils.loss.vanilla_tis_function"
        )
    if credit.advantage not in (None, "grpo"):
        _check_replaces(args, credit)
    _warn(args, credit)


def _check_replaces(args: Namespace, credit: CreditConfig) -> None:
    estimator = _estimator(args)
    if getattr(args, "custom_advantage_function_path", None) is not None:
        raise ValueError(
            f"midstream.credit.estimators {credit.advantage} takes the place of rewards spread over the tokens, and "
            "--custom-advantage-function-path sets others: leave out one of the two"
        )
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
    if set(NEEDS_FORKS) & set(credit.estimators) and not getattr(args, "calculate_per_token_loss", True):
        _logger.warning(
            "--calculate-per-token-loss is off: the tokens of samples with few trained ones weigh more, those of "
            "continuations among them, and what a prefix and its continuations weigh is not what %s assumes",
            credit.advantage,
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


def _estimator(args: Namespace) -> str:
    return str(getattr(args, "advantage_estimator", "grpo"))


def _computes_log_probs(args: Namespace) -> bool:
    """Whether slime's trainer has log-probs of its own when advantages are set.

    It spares itself that pass where a rollout is one optimizer step and nothing else needs them. Hosts without the flag
    that asks for them always have them.
    """
    if not hasattr(args, "get_mismatch_metrics"):
        return True
    if args.get_mismatch_metrics:
        return True
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    needed = (
        args.kl_coef != 0,
        args.use_critic,
        args.keep_old_actor,
        args.use_opd,
        args.global_batch_size != samples,
    )
    return not args.use_rollout_logprobs and any(needed)
