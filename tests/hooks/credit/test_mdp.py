"""The process that proves the estimators is itself exact: against enumeration, autograd and the job's own loss."""

import pytest
import torch
from benchmarks.stateful_mdp.gradients import own_ratio_weights, policy_gradients
from benchmarks.stateful_mdp.groups import Layout, credit_batch, log_ratios, play
from benchmarks.stateful_mdp.moments import deviation, relative_bias, relative_variances
from benchmarks.stateful_mdp.process import (
    ascend,
    exact_gradient,
    expected_reward,
    mean_squared_log_ratio,
    reward_variances,
    switched,
    values,
    visits,
)
from benchmarks.stateful_mdp.workspace import (
    FORGIVING,
    NEWEST_VERSION,
    RIGHT,
    STICKY,
    UNTOUCHED,
    WRONG,
    files_of,
    policy_versions,
    workspace_process,
    write_lag,
)
from torch import Tensor

from midstream.local.loss import clipped_policy_loss
from tests.hooks.credit.enumerated import all_groups, tiny_logits, tiny_process

ONE = Layout(alone=1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_values_and_visits_are_those_of_all_rollouts():
    process = tiny_process(turns=(0, 1, 1, 2))
    policy = tiny_logits(process, seed=1).softmax(-1)
    rollouts, chances = all_groups(process, policy, ONE, cut=0)
    assert float(chances.sum()) == pytest.approx(1)
    assert expected_reward(process, policy) == pytest.approx(float(chances @ rollouts.rewards))
    value, visited = values(process, policy), visits(process, policy).mean(0)
    for step in range(process.steps + 1):
        for state in range(2):
            here = chances * (rollouts.states[:, step] == state)
            assert float(visited[step, state]) == pytest.approx(float(here.sum()))
            assert float((here @ rollouts.rewards) / here.sum()) == pytest.approx(float(value[step, state]))


def test_the_exact_gradient_is_that_of_the_enumerated_expectation():
    process = tiny_process(turns=(0, 1, 1, 2))
    logits = tiny_logits(process, seed=1).requires_grad_()
    rollouts, chances = all_groups(process, logits.detach().softmax(-1), ONE, cut=0)
    steps = torch.arange(process.steps)
    log_probs = logits.log_softmax(-1)[steps, rollouts.states[:, :-1], rollouts.actions].sum(-1)
    # The chance of a rollout as a function of the logits; transitions are in `chances`.
    (chances * (log_probs - log_probs.detach()).exp() @ rollouts.rewards).backward()
    torch.testing.assert_close(exact_gradient(process, logits.detach()), logits.grad)


def test_a_policy_that_is_switched_plays_the_old_one_first():
    process = tiny_process(turns=(0, 0, 1, 2))
    old, new = (tiny_logits(process, seed=seed).softmax(-1) for seed in (1, 2))
    both = switched(process, old, new, cut=1)
    assert torch.equal(both[:2], old[:2])
    assert torch.equal(both[2:], new[2:])
    torch.testing.assert_close(values(process, both)[2:], values(process, new)[2:])
    torch.testing.assert_close(visits(process, both)[:, :3], visits(process, old)[:, :3])


def test_ascent_raises_the_reward_and_moves_the_policy():
    process = tiny_process()
    versions = ascend(process, tiny_logits(process, seed=1), step_size=1.0, versions=3)
    rewards = [expected_reward(process, each.softmax(-1)) for each in versions]
    assert rewards == sorted(rewards)
    first, last = versions[0].softmax(-1), versions[-1].softmax(-1)
    assert mean_squared_log_ratio(process, first, last, cut=2) > 0
    assert mean_squared_log_ratio(process, last, last, cut=2) == 0


def test_mean_squared_log_ratio_is_that_of_all_prefixes():
    process = tiny_process()
    old, new = (tiny_logits(process, seed=seed).softmax(-1) for seed in (1, 2))
    rollouts, chances = all_groups(process, old, ONE, cut=0)
    squares = log_ratios(rollouts, new, old)[:, :2] ** 2
    assert mean_squared_log_ratio(process, old, new, cut=2) == pytest.approx(float(chances @ squares.mean(1)))


def test_variances_between_and_within_states_add_up_to_that_of_the_reward():
    process = tiny_process()
    policy = tiny_logits(process, seed=1).softmax(-1)
    between, within = reward_variances(process, policy, cut=2)
    of_prompts = values(process, policy)[0, process.prompts]
    assert between + within == pytest.approx(float((of_prompts * (1 - of_prompts)).mean()))


def test_what_is_played_comes_as_often_as_it_should():
    process = tiny_process()
    old, new = (tiny_logits(process, seed=seed).softmax(-1) for seed in (1, 2))
    policy = switched(process, old, new, cut=1)
    rollouts = 40_000
    played = play(process, policy, Layout(2, 1, 2), cut=1, groups=rollouts // 4, generator=generator())
    for member in range(4):
        for step in range(process.steps + 1):
            found = float((played.states[member::4, step] == 1).to(torch.float64).mean())
            expected = float(visits(process, policy).mean(0)[step, 1])
            assert found == pytest.approx(expected, abs=5 * 0.5 / (rollouts / 4) ** 0.5)
    assert float(played.rewards.mean()) == pytest.approx(expected_reward(process, policy), abs=0.02)


def test_continuations_share_their_prefix_and_part_after_it():
    process = tiny_process(turns=(0, 0, 1, 2))
    policy = tiny_logits(process, seed=1).softmax(-1)
    layout = Layout(alone=1, anchors=2, continuations=3)
    played = play(process, policy, layout, cut=1, groups=50, generator=generator())
    by_group = played.states.view(50, 7, -1)
    for family in (slice(1, 4), slice(4, 7)):
        assert (by_group[:, family, :3] == by_group[:, family.start, None, :3]).all()
        assert (by_group[:, family, 3:] != by_group[:, family.start, None, 3:]).any()
    batch = credit_batch(process, played, cut=1, lag=2)
    inherited = batch.inherited.view(50, 7, 3)
    assert inherited.any(0).tolist() == [
        [each, False, False] for each in (False, False, True, True, False, True, True)
    ]
    assert batch.shared.view(50, 7, 3)[0, :, 0].tolist() == [False] + [True] * 6
    assert len(set(batch.families[:14].tolist())) == 5  # NONE, and two of each group
    assert batch.lengths[:3].tolist() == [2, 1, 1]
    # One that is alone, two prefixes, six suffixes.
    assert layout.tokens(process, 1) == 4 + 2 * 2 + 6 * 2
    assert layout.tokens(process, 1, discarded=True) == 4 + 6 * 2 + 6 * 2


@pytest.mark.parametrize("recorded_is_old", [False, True])
def test_gradients_are_those_of_the_jobs_loss(recorded_is_old: bool):
    """With its ratio at 1, and where it is that to the recorded log-probs and nothing is clipped."""
    process = tiny_process()
    made = tiny_logits(process, seed=2).softmax(-1)
    logits = tiny_logits(process, seed=1).requires_grad_()
    now = logits.detach().softmax(-1)
    played = play(process, made, Layout(4), cut=2, groups=8, generator=generator())
    advantages = torch.randn(32, process.steps, generator=generator(), dtype=torch.float64)
    mask = (torch.rand(32, process.steps, generator=generator()) < 0.7).to(torch.float64)
    log_probs = logits.log_softmax(-1)[torch.arange(process.steps), played.states[:, :-1], played.actions]
    ratios = log_ratios(played, now, made)
    old = log_probs.detach() - ratios if recorded_is_old else log_probs.detach()
    loss = clipped_policy_loss(log_probs, old, advantages, mask, eps_low=1.0, eps_high=1e9)
    loss.loss.backward()
    weights = ratios.exp() if recorded_is_old else own_ratio_weights(ratios, corrected=False)
    by_batch = policy_gradients(played, advantages * mask * weights, now, batches=4)
    torch.testing.assert_close(by_batch.sum(0), -logits.grad)


def test_the_hosts_correction_of_a_token_is_its_ratio_up_to_a_bound():
    ratios = torch.tensor([0.5, 1.0, 1.9, 7.0], dtype=torch.float64)
    assert own_ratio_weights(ratios.log(), corrected=True).tolist() == pytest.approx([0.5, 1.0, 1.9, 2.0])
    assert own_ratio_weights(ratios.log(), corrected=False).tolist() == [1, 1, 1, 1]


def estimates(batches: int, *, bias: float, seed: int) -> tuple[Tensor, Tensor]:
    """Of a gradient of 50 numbers and norm 1, each with a standard deviation of 0.5."""
    exact = torch.full((50,), 50**-0.5, dtype=torch.float64)
    seeded = torch.Generator().manual_seed(seed)
    noise = 0.5 * torch.randn(batches, 50, generator=seeded, dtype=torch.float64)
    return (1 + bias) * exact + noise - exact, exact


def test_bias_and_deviation_are_found_below_the_noise():
    errors, _ = estimates(2000, bias=0.3, seed=0)
    products = errors @ errors.T
    found = relative_bias(products, 1.0)
    assert found.low < 0.3 < found.high
    assert found.value == pytest.approx(0.3, abs=0.03)
    spread = deviation(relative_variances(products, 1.0), cost=2.0)
    assert spread.value == pytest.approx((2 * 50 * 0.25) ** 0.5, rel=0.02)


@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_intervals_hold_the_bias_about_as_often_as_they_say(bias: float):
    held = []
    for seed in range(200):
        errors, _ = estimates(60, bias=bias, seed=seed)
        found = relative_bias(errors @ errors.T, 1.0)
        held.append(found.low <= bias <= found.high)
    assert 0.9 <= sum(held) / len(held) <= 0.995


def test_states_differ_more_in_value_where_writes_stay():
    variances = {}
    for setting in (STICKY, FORGIVING):
        process = workspace_process(setting)
        newest = policy_versions(process, seed=0)[NEWEST_VERSION].softmax(-1)
        torch.testing.assert_close(process.transitions.sum(-1), torch.ones(16, 81, 3, dtype=torch.float64))
        variances[setting] = [reward_variances(process, newest, cut) for cut in (2, 4, 6)]
    shares = {key: [b / (b + w) for b, w in found] for key, found in variances.items()}
    assert all(sticky > 1.5 * forgiving for sticky, forgiving in zip(*shares.values(), strict=True))


def test_a_lag_of_eight_moves_the_policy_about_as_far_as_is_still_trained_on():
    process = workspace_process(STICKY)
    versions = [each.softmax(-1) for each in policy_versions(process, seed=0)]
    moved = [
        mean_squared_log_ratio(process, versions[NEWEST_VERSION - lag], versions[-1], cut=4)
        for lag in (0, 1, 4, 8, 16)
    ]
    assert moved == sorted(moved)
    assert moved[0] == 0
    assert 0.02 < moved[3] < 0.06 < moved[4]


def test_the_environments_lag_is_the_share_of_old_writes_that_survive():
    def workspace(*files: int) -> int:
        return sum(state * 3**file for file, state in enumerate(files))

    new, right, wrong = UNTOUCHED, RIGHT, WRONG
    acts_in = [(new, new, new), (right, new, new), (right, wrong, new), (right, right, new)]
    turns = torch.tensor([[workspace(*files) for files in acts_in]])
    assert files_of(turns)[0, 2].tolist() == [right, wrong, new]
    assert write_lag(turns, cut=2, lag=8).tolist() == [[0, 8, 8, 4]], (
        "the second file was written again, by turn 2"
    )
    assert write_lag(turns, cut=0, lag=8).tolist() == [[0, 0, 0, 0]]
