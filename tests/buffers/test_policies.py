"""What each policy chooses, and what the bounds take away whatever it chose."""

import pytest

from midstream.buffers.policies.base import DROP, RESTART, RESUME, Action, Choice, CutOff, Policy, rewind_to
from midstream.buffers.policies.bounds import bounded
from midstream.buffers.policies.builtin import MAKERS
from midstream.buffers.policies.load import load_policy
from midstream.buffers.policies.rewind import Rewind
from midstream.buffers.rollout import PartialRollout, Status
from midstream.conf.schema import BoundsConfig, LayerConfig
from midstream.conf.schema.policies import BUILT_IN
from tests.buffers.made import played

NOW = 10
OFF = {"trajectory": None, "token": None, "environment": None}


@pytest.mark.parametrize(
    ("name", "cut_off", "choice", "keeps_environment"),
    [
        ("wait", CutOff.NOTHING, RESUME, True),
        ("discard", CutOff.DROPPED, DROP, True),
        ("restart", CutOff.EMPTIED, RESTART, True),
        ("continue", CutOff.KEPT, RESUME, True),
        ("rewind", CutOff.KEPT, RESUME, True),
        ("naive", CutOff.KEPT, RESUME, False),
    ],
)
def test_what_the_built_in_policies_do_to_a_fresh_rollout(
    name: str, cut_off: CutOff, choice: Choice, keeps_environment: bool
) -> None:
    policy = load_policy(LayerConfig(resume_policy=name))
    assert (policy.name, policy.cut_off, policy.keeps_environment) == (name, cut_off, keeps_environment)
    assert policy.choose(played((9, {"b": "b1"}), action=9), NOW) == choice


def test_every_name_of_the_schema_has_a_policy() -> None:
    assert list(MAKERS) == list(BUILT_IN)


@pytest.mark.parametrize(
    ("turns", "action", "choice"),
    [
        ([(5, {"b": "b1"}), (6, {"c": "c1"})], 6, RESUME),
        # What an old policy only looked at is no reason to go back.
        ([(0, {}), (6, {"c": "c1"})], 6, RESUME),
        # Turn 1 wrote under version 1: the newest state without that is the one before it.
        ([(0, {}), (1, {"b": "b1"}), (6, {"c": "c1"})], 6, rewind_to(1)),
        # Turn 1 wrote under version 1, and turn 2 wrote over it.
        ([(0, {}), (1, {"b": "b1"}), (6, {"b": "b2"})], 6, RESUME),
        ([(0, {}), (1, {"b": "b1"}), (6, {"b": "b2"}), (6, {"c": "c1"})], 0, rewind_to(4)),
        ([(1, {"b": "b1"})], 6, rewind_to(0)),
        # An action that is not executed yet is a write that can still be left out.
        ([(6, {"b": "b1"})], 1, rewind_to(1)),
    ],
    ids=["young", "only read", "old write", "overwritten", "old action behind", "first turn", "old action"],
)
def test_rewind_goes_back_to_before_the_oldest_write_that_survives(
    turns, action: int, choice: Choice
) -> None:
    assert Rewind(max_lag=5).choose(played(*turns, action=action), NOW) == choice


def test_rewind_looks_past_a_snapshot_that_is_gone() -> None:
    rollout = played((6, {"b": "b1"}), (7, {"c": "c1"}), (8, {"d": "d1"}))
    rollout.forget("s3")
    assert Rewind(max_lag=5).choose(rollout, NOW) == rewind_to(2)
    for lost in ("s0", "s1", "s2"):
        rollout.forget(lost)
    assert Rewind(max_lag=5).choose(rollout, NOW) == RESTART


def test_to_rewind_by_the_age_of_tokens_would_always_be_a_restart() -> None:
    """Why the policy looks at states: the first tokens of a rollout are its oldest."""
    rollout = played((0, {}), (1, {"b": "b1"}), (6, {"c": "c1"}))
    Rewind(max_lag=5).choose(rollout, NOW).apply(rollout)
    assert [span.version for span in rollout.spans] == [0]


@pytest.mark.parametrize(
    ("bounds", "choice"),
    [
        ({"trajectory": 10, "token": 10, "environment": 9}, RESUME),
        ({"trajectory": 9}, Choice(Action.RESTART, reason="trajectory_lag")),
        ({"token": 9}, Choice(Action.RESTART, reason="token_lag")),
        ({"environment": 8}, Choice(Action.RESTART, reason="environment_lag")),
        ({"environment": 8, "beyond": "drop"}, Choice(Action.DROP, reason="environment_lag")),
    ],
)
def test_each_level_has_its_bound(bounds, choice: Choice) -> None:
    rollout = played((0, {}), (1, {"b": "b1"}))
    assert bounded(RESUME, rollout, NOW, BoundsConfig(**OFF | bounds)) == choice


def test_bounds_judge_what_a_rewind_leaves_and_change_nothing() -> None:
    rollout = played((0, {}), (1, {"b": "b1"}), action=6)
    before = rollout.to_json()
    bounds = BoundsConfig(**OFF | {"environment": 8})
    assert bounded(rewind_to(1), rollout, NOW, bounds) == rewind_to(1)
    assert bounded(RESUME, rollout, NOW, bounds).action is Action.RESTART
    assert rollout.to_json() == before


def test_what_nobody_will_train_on_has_no_bound() -> None:
    rollout = played((0, {"b": "b1"}))
    bounds = BoundsConfig(**OFF | {"token": 3, "beyond": "drop"})
    rollout.status = Status.FAILED
    assert bounded(RESUME, rollout, NOW, bounds) == RESUME
    rollout.status = Status.COMPLETED
    assert bounded(RESUME, rollout, NOW, bounds).action is Action.DROP


class DropLong(Policy):
    """A policy of the user's own."""

    def __init__(self, longest: int = 4) -> None:
        self.longest = longest

    def choose(self, rollout: PartialRollout, version: int) -> Choice:
        return DROP if rollout.generated_tokens > self.longest else RESUME


class Forgetful(Policy):
    """Lacks its choice."""


class Vague(DropLong):
    cut_off = "kept"


NOT_A_POLICY = 3


def test_a_policy_of_the_users_own_gets_its_parameters() -> None:
    name = f"{__name__}:DropLong"
    policy = load_policy(LayerConfig(resume_policy=name, policies={"custom": {"longest": 5}}))
    assert (policy.name, policy.cut_off, policy.keeps_environment) == (name, CutOff.KEPT, True)
    assert policy.choose(played((1, {}), (1, {}), action=1), NOW) == DROP
    assert policy.choose(played((1, {}), (1, {})), NOW) == RESUME


@pytest.mark.parametrize(
    ("name", "custom", "message"),
    [
        ("nowhere.at.all:Policy", {}, "there is no module 'nowhere': install it"),
        ("{here}:Missing", {}, "has no class 'Missing'"),
        ("{here}:NOT_A_POLICY", {}, "derive it from midstream.buffers.policies.base.Policy"),
        ("{here}:DropLong", {"length": 3}, "midstream.policies.custom, now {'length': 3}.*'length'"),
        ("{here}:Forgetful", {}, "abstract"),
        ("{here}:Vague", {}, "its cut_off is 'kept', use a member of CutOff"),
    ],
)
def test_a_policy_that_cannot_be_made_is_named_with_the_fix(name: str, custom, message: str) -> None:
    layer = LayerConfig(resume_policy=name.format(here=__name__), policies={"custom": custom})
    with pytest.raises(ValueError, match=f"midstream.resume_policy: got '.*{message}"):
        load_policy(layer)
