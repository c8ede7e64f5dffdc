"""Settings that are each fine and cannot stand together. Keys of the problems are those of the whole job."""

import math
from collections.abc import Iterator, Sequence

from midstream.conf.errors import Problem
from midstream.conf.schema.curriculum import CurriculumConfig
from midstream.conf.schema.layer import LayerConfig
from midstream.conf.schema.policies import comes_back, measurement_problems
from midstream.conf.schema.sections import RolloutConfig, ServerConfig, TaskConfig, TrainerConfig

_GROUP_NORMALISATION = "midstream.hooks.slime.rewards.post_process"
_FILTER = "midstream.hooks.slime.filters.informative"
_OBSERVER = "midstream.hooks.slime.filters.observe_all"


def strategy_problems(strategies: Sequence[str]) -> Iterator[Problem]:
    """Each run has a folder named after its strategy, so no name may come twice."""
    if len(set(strategies)) < len(strategies):
        yield Problem("strategies", strategies, "name each strategy once")


def task_problems(tasks: TaskConfig) -> Iterator[Problem]:
    """Held-out tasks are of the kind that is trained on, so they cannot be generated beside a file."""
    if tasks.held_out and tasks.path is not None and tasks.held_out_path is None:
        yield Problem("tasks.held_out", tasks.held_out, "name their file in tasks.held_out_path, or use 0")
    if tasks.held_out_every is not None and not tasks.held_out:
        yield Problem("tasks.held_out_every", tasks.held_out_every, "set tasks.held_out, or use null")


def source_problems(tasks: TaskConfig) -> Iterator[Problem]:
    """Sources are of tasks that are generated, and each of them has one."""
    if not tasks.sources:
        return
    if tasks.path is not None:
        fix = "take them out, with ~tasks.sources: the tasks of tasks.path name their own"
        yield Problem("tasks.sources", sorted(tasks.sources), fix)
        return
    shares = [source.share for source in tasks.sources.values()]
    needed = math.ceil(sum(shares) / min(shares) - 1e-9)
    generated = {"tasks.count": tasks.count, "tasks.held_out": tasks.held_out}
    if tasks.held_out_path is not None or not tasks.held_out:
        del generated["tasks.held_out"]
    for key, count in generated.items():
        if count < needed:
            yield Problem(key, count, f"use {needed} or more, so that each of tasks.sources has a task")


def policy_problems(layer: LayerConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """What the resume policy asks of slime's own flags."""
    policy = layer.resume_policy
    needed, launched = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    resumes = comes_back(policy)
    if resumes is not None and rollout.partial_rollout != resumes:
        yield Problem(
            "rollout.partial_rollout",
            rollout.partial_rollout,
            f"midstream.resume_policy={policy} needs {str(resumes).lower()}",
        )
    if launched < needed:
        yield Problem(
            "rollout.over_sampling_batch_size", launched, f"use rollout.rollout_batch_size={needed} or more"
        )
    if policy == "wait" and launched > needed:
        yield Problem(
            "rollout.over_sampling_batch_size",
            launched,
            f"midstream.resume_policy=wait cuts nothing off: use rollout.rollout_batch_size={needed}",
        )
    yield from measurement_problems(policy, layer.policies, rollout.rollout_temperature)


def length_problems(layer: LayerConfig, rollout: RolloutConfig, server: ServerConfig) -> Iterator[Problem]:
    """A turn fits into the response, a rollout into the server's KV cache."""
    response, prompt = rollout.rollout_max_response_len, rollout.rollout_max_prompt_len or 0
    turn, cache = layer.turns.max_tokens_per_turn, server.max_total_tokens
    if turn is not None and turn > response:
        yield Problem(
            "midstream.turns.max_tokens_per_turn",
            turn,
            f"use at most rollout.rollout_max_response_len={response}",
        )
    if cache < prompt + response:
        yield Problem(
            "server.max_total_tokens",
            cache,
            f"use {prompt + response} or more, so that the longest prompt and response fit",
        )


def group_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    """A group of one has nothing to be compared with."""
    own = rollout.custom_reward_post_process_path
    if rollout.n_samples_per_prompt < 2 and own in (None, _GROUP_NORMALISATION):
        yield Problem(
            "rollout.n_samples_per_prompt",
            rollout.n_samples_per_prompt,
            "use 2 or more, or a rollout.custom_reward_post_process_path of your own: group normalisation gives 0 "
            "to a group of one",
        )


def hook_problems(layer: LayerConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Estimators work in two hooks: where whole groups are seen, and where advantages are."""
    names = layer.credit.estimators
    if names != ["grpo"] and rollout.custom_reward_post_process_path is None:
        yield Problem(
            "rollout.custom_reward_post_process_path",
            None,
            f"midstream.credit.estimators={names} needs {_GROUP_NORMALISATION}",
        )
    if layer.credit.needs_trainer and rollout.rollout_data_postprocess_path is None:
        yield Problem(
            "rollout.rollout_data_postprocess_path",
            None,
            f"midstream.credit.estimators={names} needs midstream.hooks.slime.credit.apply_credit",
        )


def curriculum_hook_problems(curriculum: CurriculumConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """A curriculum learns where groups that end are seen, and gives groups up where they are dropped."""
    if not curriculum.enabled or rollout.dynamic_sampling_filter_path == _FILTER:
        return
    if curriculum.early_stop.min_informative > 0:
        yield Problem(
            "rollout.dynamic_sampling_filter_path",
            rollout.dynamic_sampling_filter_path,
            f"midstream.curriculum.early_stop needs {_FILTER}, which drops the groups that are given up",
        )
    elif rollout.rollout_all_samples_process_path != _OBSERVER:
        yield Problem(
            "rollout.dynamic_sampling_filter_path",
            rollout.dynamic_sampling_filter_path,
            f"midstream.curriculum.enabled needs {_FILTER}, as in --strategies curriculum, or beside a filter of your "
            f"own rollout.rollout_all_samples_process_path={_OBSERVER}",
        )


def trainer_problems(trainer: TrainerConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Minibatches are equal, and the clip range is not upside down."""
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if rollouts % trainer.num_minibatches:
        yield Problem(
            "trainer.num_minibatches",
            trainer.num_minibatches,
            "use a divisor of rollout.rollout_batch_size × rollout.n_samples_per_prompt "
            f"= {rollouts} rollouts a step",
        )
    if trainer.eps_clip_high < trainer.eps_clip:
        yield Problem(
            "trainer.eps_clip_high", trainer.eps_clip_high, f"use trainer.eps_clip={trainer.eps_clip} or more"
        )
