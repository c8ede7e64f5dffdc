"""Credit on its way through slime's hooks: from the samples of a batch to the trainer's advantages."""

import multiprocessing
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.hooks.credit.lines import FOLDER
from midstream.hooks.credit.measured import measured_in
from midstream.hooks.credit.note import NoteError
from midstream.hooks.slime import keeping
from midstream.hooks.slime.credit import apply_credit
from midstream.hooks.slime.credit_flags import check_credit
from midstream.hooks.slime.host import Host, register
from midstream.hooks.slime.keeping import finish_keeping
from midstream.hooks.slime.rewards import post_process
from midstream.hooks.slime.settings import credit_counts_of, engine_of
from midstream.local.batch import convert
from midstream.local.sample import Sample
from tests.hooks.credited import LENGTH, SPLIT, args_of, forked_batch, rollout, sample, zigzag_shares

# What slime says where nothing makes its trainer compute log-probs before its loss.
SLIME: dict[str, Any] = {
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "kl_coef": 0,
    "use_critic": False,
    "keep_old_actor": False,
    "use_opd": False,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "global_batch_size": 8,
}


def trainer_data(args: Namespace, samples: list[Sample], log_ratio: float = 0.0) -> dict[str, Any]:
    """What a trainer has when it calls the hook: notes have crossed processes, rewards are spread over tokens."""
    data = pickle.loads(pickle.dumps(convert(args, samples)))
    data["advantages"] = [torch.full((LENGTH,), reward) for reward in data["rewards"]]
    data["rollout_log_probs"] = [torch.tensor(values) for values in data["rollout_log_probs"]]
    data["log_probs"] = [values + log_ratio for values in data["rollout_log_probs"]]
    data["loss_masks"] = [torch.tensor(mask, dtype=torch.int32) for mask in data["loss_masks"]]
    return data


def by_turn(data: dict[str, Any]) -> list[list[float]]:
    """The advantage of each turn of each sample, which all its tokens have."""
    for values in data["advantages"]:
        assert len(set(values[:SPLIT].tolist())) == len(set(values[SPLIT:].tolist())) == 1
    return [[round(float(values[0]), 6), round(float(values[SPLIT]), 6)] for values in data["advantages"]]


def test_the_hosts_advantages_stay_under_grpo(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch())
    before = [values.clone() for values in data["advantages"]]
    apply_credit(args, 0, data)
    assert all(torch.equal(a, b) for a, b in zip(before, data["advantages"], strict=True))
    assert "round_number" not in data
    assert data["staleness/ratio_mean"] == [1.0] * 6


def test_anchored_takes_the_place_of_what_the_host_has_spread(tmp_path: Path):
    args = args_of(tmp_path, "anchored")
    data = trainer_data(args, forked_batch())
    data["advantages"] = [
        values + 0.25 for values in data["advantages"]
    ]  # what else the host has added stays
    apply_credit(args, 0, data)
    third = 1 / 3
    assert by_turn(data) == [
        [pytest.approx(2 * third + 0.25)] * 2,
        [pytest.approx(-2 * third + 0.25)] * 2,
        [0.25, 1.25],  # the anchor is worth what the prompt is
        [0.25, -0.75],
        [1.25, 1.25],
        [-0.75, -0.75],
    ]
    assert credit_counts_of(args)["without_strangers"] == 0


def test_weights_multiply_whatever_the_host_estimates(tmp_path: Path):
    args = args_of(tmp_path, "lag_decay", "prefix_is")
    data = trainer_data(args, forked_batch(), log_ratio=0.1)
    data["advantages"] = [torch.arange(1.0, 1 + LENGTH) for _ in data["advantages"]]
    apply_credit(args, 0, data)
    # Rates of 0.1 for token and state: the first turn is 2 versions old, in the task's own state; the second is fresh,
    # in a state that is 2 versions old. The first has two tokens, whose ratios are exp(0.1).
    first, second = torch.tensor(-0.2 + 0.1).exp(), torch.tensor(-0.2 + 0.2).exp()
    expected = torch.arange(1.0, 1 + LENGTH)
    expected[:2] *= first
    expected[3:] *= second
    # The environment's own tokens, which no loss sees, are of no version, and come after the turn's.
    expected[2], expected[5] = 3 * torch.tensor(0.2).exp(), 6 * torch.tensor(-0.2 + 0.2).exp()
    torch.testing.assert_close(data["advantages"][4], expected)


def test_metrics_say_how_far_the_policy_is_from_what_it_trains_on(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch()[4:])
    data["log_probs"] = [
        values + torch.tensor([0.2, 0.2, 9, 0, 0, 9]) for values in data["rollout_log_probs"]
    ]
    apply_credit(args, 0, data)
    found = {name: values[0] for name, values in data.items() if name.startswith("staleness/")}
    assert found["staleness/prefix_log_ratio_sq"] == pytest.approx(0.04)
    assert found["staleness/prefix_log_ratio_sq_max"] == pytest.approx(0.04)
    assert found["staleness/log_ratio_sq"] == pytest.approx(0.02)
    assert found["staleness/prefix_product_log_min"] == 0.0
    assert found["staleness/prefix_product_log_max"] == pytest.approx(0.4)
    assert found["staleness/ratio_mean"] == pytest.approx((2.718281828**0.2 + 1) / 2)
    assert found["staleness/ess_lag_2"] == pytest.approx(1.0), "all of one weight"


def test_what_the_trainer_measured_is_kept_for_each_rollout(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch())
    data["log_probs"][5][:2] += 0.3
    apply_credit(args, 12, data)
    finish_keeping()
    found = measured_in(tmp_path, 12)
    assert list(found) == ["0/0", "0/1", "0/2", "0/3", "1/4", "1/5"]
    assert found["0/0"].older_tokens == 0
    resumed = found["1/5"]
    assert (resumed.older_tokens, resumed.prefix_log_ratio_sq) == (2, pytest.approx(0.09))
    assert resumed.products == ((0, 0.0), (3, pytest.approx(0.6)))


def test_a_run_directory_that_refuses_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeping, "_said", set())
    args = args_of(tmp_path, "grpo")
    (tmp_path / FOLDER).write_text("no folder")
    apply_credit(args, 0, trainer_data(args, forked_batch()))
    finish_keeping()
    assert "cannot keep what is trained on" in caplog.text


def test_the_effective_sample_size_counts_weights(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch()[4:])
    data["log_probs"][0][0] += torch.tensor(3.0).log()
    apply_credit(args, 0, data)
    # Four tokens of lag 2 with weights 3, 1, 1, 1.
    assert data["staleness/ess_lag_2"][0] == pytest.approx(36 / (4 * 12))


def test_the_mask_of_a_stale_prefix_spares_siblings_that_had_ended(tmp_path: Path):
    args = args_of(tmp_path, "mask_prefix")
    samples = forked_batch()
    data = convert(args, samples)
    assert data["loss_masks"] == [[1, 1, 0, 1, 1, 0]] * 2 + [[0, 0, 0, 1, 1, 0]] * 4


def test_probes_are_out_of_the_loss(tmp_path: Path):
    data = convert(args_of(tmp_path, "telescoped"), forked_batch())
    assert [sum(mask) for mask in data["loss_masks"]] == [4, 4, 4, 0, 4, 4]


def test_advantages_are_whitened_as_the_host_whitens_them(tmp_path: Path):
    args = args_of(tmp_path, "anchored", normalize_advantages=True)
    data = trainer_data(args, forked_batch())
    plain = trainer_data(args_of(tmp_path, "anchored"), forked_batch())
    apply_credit(args_of(tmp_path, "anchored"), 0, plain)
    apply_credit(args, 0, data)
    flat, mask = torch.cat(plain["advantages"]), torch.cat(plain["loss_masks"]).bool()
    mean, variance = flat[mask].mean(), flat[mask].var()
    torch.testing.assert_close(torch.cat(data["advantages"]), (flat - mean) / (variance + 1e-8).sqrt())


def test_a_pipeline_stage_without_advantages_loses_the_notes_and_nothing_else(tmp_path: Path):
    args = args_of(tmp_path, "anchored", "prefix_is")
    data = trainer_data(args, forked_batch())
    del data["advantages"]
    kept = data.keys() - {"round_number"}
    apply_credit(args, 0, data)
    assert data.keys() == kept


def test_without_log_probs_only_what_needs_them_is_refused(tmp_path: Path):
    args = args_of(tmp_path, "anchored")
    data = trainer_data(args, forked_batch())
    del data["log_probs"]
    apply_credit(args, 0, data)
    assert data["staleness/log_ratio_sq"] == [0.0] * 6
    args = args_of(tmp_path, "prefix_is")
    data = trainer_data(args, forked_batch())
    del data["log_probs"]
    with pytest.raises(ValueError, match="prefix_is needs log-probs of the trainer.*--get-mismatch-metrics"):
        apply_credit(args, 0, data)


def test_a_note_that_does_not_fit_its_response_is_refused(tmp_path: Path):
    args = args_of(tmp_path, "anchored")
    data = trainer_data(args, forked_batch())
    data["response_lengths"][3] = 5
    with pytest.raises(NoteError, match="sample 0/3: its segments have 6 tokens, its response 5"):
        apply_credit(args, 0, data)


def test_data_without_notes_is_refused_where_an_estimator_needs_them(tmp_path: Path):
    data = trainer_data(args_of(tmp_path, "grpo"), forked_batch())
    del data["round_number"]
    apply_credit(args_of(tmp_path, "grpo"), 0, data)
    with pytest.raises(
        ValueError, match="rollout 7 came without notes for anchored: set --custom-reward-post"
    ):
        apply_credit(args_of(tmp_path, "anchored"), 7, data)


def test_what_a_host_numbers_its_rounds_with_is_no_note(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch()) | {"round_number": [1, 2, 3, 1, 2, 3]}
    apply_credit(args, 7, data)
    assert "round_number" not in data
    with pytest.raises(ValueError, match="rollout 7 came without notes for anchored"):
        apply_credit(args_of(tmp_path, "anchored"), 7, data | {"round_number": [1, 2, 3, 1, 2, 3]})


def test_what_is_not_finite_stops_the_step(tmp_path: Path):
    args = args_of(tmp_path, "prefix_is")
    data = trainer_data(args, forked_batch())
    data["log_probs"][1][0] = float("nan")
    with pytest.raises(ValueError, match="a log-prob of rollout 0/1 is not finite"):
        apply_credit(args, 0, data)
    data = trainer_data(args, forked_batch())
    data["advantages"][2][0] = float("inf")
    with pytest.raises(ValueError, match="an advantage of rollout 0/2 is not finite"):
        apply_credit(args, 0, data)


def test_log_probs_that_are_not_finite_stop_estimators_that_only_measure_them(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch())
    data["log_probs"][1][0] = -float("inf")
    data["log_probs"][0][2] = float("nan")  # of the environment: nobody's
    with pytest.raises(ValueError, match="a log-prob of rollout 0/1 is not finite"):
        apply_credit(args, 0, data)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_where_it_would_count(tmp_path: Path, reward: float):
    args, samples = args_of(tmp_path, "grpo"), forked_batch()
    samples[1].reward = reward
    with pytest.raises(ValueError, match="the reward of sample 1 is"):
        post_process(args, samples)
    samples[1].remove_sample = True
    assert post_process(args, samples)[1][:4] == pytest.approx([1 / 3, 0, 1 / 3, -2 / 3])


def test_a_sample_without_a_token_may_be_the_last_of_its_rank(tmp_path: Path):
    args = args_of(tmp_path, "anchored", "prefix_is")
    samples = [*forked_batch(), Sample(group_index=1, index=6, tokens=[7, 7], reward=0.0, remove_sample=True)]
    data = trainer_data(args, samples)
    data["advantages"][6] = torch.zeros(0)
    apply_credit(args, 3, data)
    assert by_turn({"advantages": data["advantages"][:6]})[4:] == [[1, 1], [-1, -1]]
    assert len(data["advantages"][6]) == 0
    finish_keeping()
    assert measured_in(tmp_path, 3)["1/6"].products == ()


def test_ours_are_exact_beside_rewards_of_another_size(tmp_path: Path):
    args = args_of(tmp_path, "anchored")
    samples = forked_batch()
    samples[0].reward = 3e8
    data = trainer_data(args, samples)
    apply_credit(args, 0, data)
    assert [values[SPLIT] for values in data["advantages"][2:4]] == [1, -1]


def test_samples_of_one_rollout_may_share_their_metadata(tmp_path: Path):
    args = args_of(tmp_path, "mask_prefix", "lag_decay")
    shared: dict[str, Any] = {}
    samples = [
        Sample(group_index=0, index=0, tokens=[7] * (2 + n), response_length=n, reward=1.0, metadata=shared)
        for n in (2, 3)
    ]
    for part, version in zip(samples, "35", strict=True):
        part.weight_versions = [version]
        part.rollout_id = 4  # type: ignore[attr-defined]
    post_process(args, samples)
    assert [part.metadata["round_number"].lengths for part in samples] == [[2], [3]]
    assert shared == {}
    assert [part.loss_mask for part in samples] == [[0, 0], None], "the first is of an older version"


def test_metrics_say_what_the_estimators_did(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    data = trainer_data(args, forked_batch(), log_ratio=0.1)
    apply_credit(args, 0, data)
    assert (data["credit/changed"], data["credit/size"]) == ([0.0] * 6, [1.0] * 6)
    assert (data["credit/prefix_weight_mean"], data["credit/prefix_weight_bounded"]) == ([1.0] * 6, [0.0] * 6)
    args = args_of(tmp_path, "anchored", "prefix_is")
    data = trainer_data(args, forked_batch(), log_ratio=1.0)
    apply_credit(args, 0, data)
    assert data["credit/changed"][0] > 0
    # Each token in the loss is in a rollout with at least two stale ones, of which another has a ratio of e.
    assert (data["credit/prefix_weight_mean"][0], data["credit/prefix_weight_bounded"][0]) == (2.0, 1.0)


@pytest.mark.parametrize(
    "flags",
    [{"get_mismatch_metrics": True}, {"kl_coef": 0.1}, {"use_critic": True}, {"global_batch_size": 2}],
)
def test_flags_that_make_the_trainer_compute_log_probs_are_enough(tmp_path: Path, flags: dict[str, Any]):
    check_credit(args_of(tmp_path, "prefix_is", **SLIME | flags))


def test_what_costs_more_than_it_says_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    check_credit(args_of(tmp_path, "grpo"))
    check_credit(args_of(tmp_path, "prefix_is", use_tis=True))
    check_credit(args_of(tmp_path, "anchored", calculate_per_token_loss=True))
    assert not caplog.records
    check_credit(args_of(tmp_path, "anchored", calculate_per_token_loss=False))
    assert "--calculate-per-token-loss is off" in caplog.text
    check_credit(args_of(tmp_path, "prefix_is", use_tis=False))
    assert "--use-tis is off" in caplog.text
    args = args_of(tmp_path, "grpo")
    args.midstream["resume_policy"] = "anchor"
    check_credit(args)
    assert "resume_policy anchor forks groups, and grpo compares a prefix with its own" in caplog.text


def test_versions_from_the_future_count_as_fresh(tmp_path: Path):
    args = args_of(tmp_path, "lag_decay")
    engine_of(args).version = 1
    data = trainer_data(args, forked_batch()[:2])
    apply_credit(args, 0, data)
    assert by_turn(data) == [[0.5, 0.5], [-0.5, -0.5]]


def test_a_token_from_the_future_makes_no_other_older(tmp_path: Path):
    args = args_of(tmp_path, "lag_decay")  # the engine serves version 5
    data = trainer_data(args, [sample(0, 1, rollout("0", 9)), sample(1, 0, rollout("0", 5))])
    apply_credit(args, 0, data)
    first, second = data["advantages"]
    torch.testing.assert_close(first, -second, msg="both are as old, seen from version 5")
    assert first[0] == pytest.approx(0.5 * 2.718281828**-0.2)


def test_a_rollout_of_several_samples_counts_once(tmp_path: Path):
    args = args_of(tmp_path, "grpo")
    samples = [sample(n, reward, rollout("0", 3)) for n, reward in enumerate((1, 1, 0))]
    _, rewards = post_process(args, samples)
    assert rewards == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    for number, rollout_id in enumerate((4, 4, 5)):
        samples[number].rollout_id = rollout_id  # type: ignore[attr-defined]
    assert post_process(args, samples)[1] == [0.5, 0.5, -0.5]
    samples[0].reward = 0.0
    assert post_process(args, samples)[1] == pytest.approx([-1 / 3, 2 / 3, -1 / 3]), "rewards of their own"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [0.5, -0.5]),
        ({"grpo_std_normalization": True}, [0.5**0.5, -(0.5**0.5)]),
        ({"advantage_estimator": "cispo"}, [0.5, -0.5]),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline", "grpo_std_normalization": True},
            [0.5, -0.5],
        ),
        ({"advantage_estimator": "reinforce_plus_plus"}, [1.0, 0.0]),
        ({"advantage_estimator": "ppo", "grpo_std_normalization": True}, [1.0, 0.0]),
        ({"rewards_normalization": False}, [1.0, 0.0]),
    ],
)
def test_rewards_are_normalised_where_the_host_would(
    tmp_path: Path, flags: dict[str, Any], expected: list[float]
):
    samples = forked_batch()[4:]
    assert post_process(args_of(tmp_path, "lag_decay", **flags), samples)[1] == pytest.approx(
        expected, abs=1e-5
    )


def test_what_takes_the_place_of_a_reward_takes_all_of_it(tmp_path: Path):
    """Also where the host has spread the reward as it is."""
    args = args_of(tmp_path, "anchored", rewards_normalization=False)
    data = trainer_data(args, forked_batch())
    assert data["rewards"] == [1, 0, 1, 0, 1, 0]
    apply_credit(args, 0, data)
    assert by_turn(data)[4:] == [[1, 1], [-1, -1]]


def test_a_failed_member_enters_no_statistic(tmp_path: Path):
    args = args_of(tmp_path, "anchored")
    samples = [*forked_batch(), sample(6, 0, rollout("1", 5), failed=True)]
    data = trainer_data(args, samples)
    apply_credit(args, 0, data)
    assert by_turn(data)[4:] == [[1, 1], [-1, -1], [0, 0]]


@pytest.mark.parametrize(
    ("estimators", "settings", "message"),
    [
        (["mask_prefix"], {"custom_reward_post_process_path": None}, "add --custom-reward-post-process-path"),
        (["lag_decay"], {"rollout_data_postprocess_path": None}, "add --rollout-data-postprocess-path"),
        (["grpo"], {"log_multi_turn": True}, "--log-multi-turn reads what carries"),
        (["state_hash"], {"advantage_estimator": "ppo"}, "--advantage-estimator ppo makes its own"),
        (
            ["state_hash"],
            {"custom_advantage_function_path": "a.b"},
            "--custom-advantage-function-path sets others",
        ),
        (["lag_decay"], {"advantage_estimator": "gspo"}, "gspo all tokens of a sample share the mean"),
        (["prefix_is"], SLIME, "add --use-tis --get-mismatch-metrics --custom-tis-function-path"),
        (
            ["prefix_is"],
            SLIME | {"global_batch_size": 4, "use_rollout_logprobs": True},
            "prefix_is needs log-probs that the trainer computes",
        ),
        (["state_hash"], {"use_opd": True, "normalize_advantages": True}, "cannot tell distillation"),
    ],
)
def test_flags_that_contradict_the_estimators_are_refused(
    tmp_path: Path, estimators: list[str], settings: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        check_credit(args_of(tmp_path, *estimators, **settings))


# Context parallelism in two real processes.


def own_share(values: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    from megatron.core import parallel_state

    assert len(values) == response_length
    size = parallel_state.get_context_parallel_world_size()
    return zigzag_shares(values, total_length, size)[parallel_state.get_context_parallel_rank()]


def uneven(data: dict[str, Any]) -> dict[str, Any]:
    """With a log-ratio of its own for each token, so that one that is taken for another shows."""
    data["log_probs"] = [values + 0.05 * torch.arange(LENGTH) for values in data["rollout_log_probs"]]
    return data


def join_ranks(rank: int, folder: Path, context_parallel_size: int) -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(context_parallel_size=context_parallel_size)


def one_rank(rank: int, folder: Path, found: Any) -> None:
    import midstream.local.sample  # noqa: F401  registers the host that this one takes the place of

    join_ranks(rank, folder, context_parallel_size=2)
    register(SlicingHost("midstream.local"))
    results = {}
    for name, settings in SPREAD.items():
        args = args_of(folder, "anchored", "prefix_is", **settings)
        data = uneven(trainer_data(args, forked_batch()))
        lengths = data["total_lengths"], data["response_lengths"]
        for key in ("advantages", "log_probs", "rollout_log_probs"):
            data[key] = [own_share(v, t, r) for v, t, r in zip(data[key], *lengths, strict=True)]
        apply_credit(args, 0, data)
        results[name] = [values.tolist() for values in data["advantages"]]
    found.put((rank, results))
    torch.distributed.destroy_process_group()


class SlicingHost(Host):
    def load(self, room: str, name: str) -> Any:
        assert (room, name) == ("slices", "slice_log_prob_with_cp")
        return own_share


SPREAD: dict[str, dict[str, Any]] = {"plain": {}, "whitened": {"normalize_advantages": True}}


def in_two_processes(work: Any, folder: Path) -> dict[int, Any]:
    """What a rank's work put into its queue, by rank."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=work, args=(rank, folder, found)) for rank in range(2)]
    for process in ranks:
        process.start()
    results = dict(found.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    return results


def test_slices_of_two_ranks_are_those_of_one(tmp_path: Path):
    shares = in_two_processes(one_rank, tmp_path)
    for name, settings in SPREAD.items():
        args = args_of(tmp_path, "anchored", "prefix_is", **settings)
        whole = uneven(trainer_data(args, forked_batch()))
        apply_credit(args, 0, whole)
        for values, first, second in zip(whole["advantages"], shares[0][name], shares[1][name], strict=True):
            for share, expected in zip((first, second), zigzag_shares(values, 2 + LENGTH), strict=True):
                assert share == pytest.approx(expected.tolist(), abs=1e-6)


# Data parallelism: the samples of a batch are dealt out, here one by one, and no rank has a whole group.


def dealt(data: dict[str, Any], rank: int) -> dict[str, Any]:
    return {key: values[rank::2] for key, values in data.items()}


def rank_of_samples(rank: int, folder: Path, found: Any) -> None:
    join_ranks(rank, folder, context_parallel_size=1)
    results = {}
    for step, (name, settings) in enumerate(SPREAD.items()):
        args = args_of(folder, "anchored", "prefix_is", **settings)
        data = dealt(uneven(trainer_data(args, forked_batch())), rank)
        apply_credit(args, step, data)
        results[name] = [values.tolist() for values in data["advantages"]]
    finish_keeping()
    found.put((rank, results))
    torch.distributed.destroy_process_group()


def test_samples_of_two_ranks_are_those_of_one(tmp_path: Path):
    shares = in_two_processes(rank_of_samples, tmp_path)
    for step, (name, settings) in enumerate(SPREAD.items()):
        args = args_of(tmp_path, "anchored", "prefix_is", **settings)
        whole = uneven(trainer_data(args, forked_batch()))
        apply_credit(args, step, whole)
        for rank in range(2):
            for share, expected in zip(shares[rank][name], whole["advantages"][rank::2], strict=True):
                assert share == pytest.approx(expected.tolist(), abs=1e-6)
        paths = sorted(path.name for path in (tmp_path / FOLDER).glob(f"{step:06d}.*"))
        assert paths == [f"{step:06d}.ratios-{rank}.json.zst" for rank in range(2)]
        assert sorted(measured_in(tmp_path, step)) == ["0/0", "0/1", "0/2", "0/3", "1/4", "1/5"]
