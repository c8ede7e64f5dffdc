"""Who wrote what in a rollout's workspace, by hand-computed cases."""

import json

import pytest

from midstream.buffers.rollout import PartialRollout, Span, Status
from midstream.envs.lineage import Write, chain, shares, surviving_writes
from midstream.envs.protocol import Change, Snapshot
from midstream.hooks.credit.blame import MOST_PATH_CHARACTERS, MOST_PATHS, Blame, Rest, blame_of
from tests.buffers.made import World, act, played

HOSTILE = [
    "line\nbreak",
    "\x1b[31mred\x1b[0m",
    "\udcff\udc80 not UTF-8",
    "\u202egnp.exe",
    "<script>",
    " ",
    "a\tb",
]


def test_each_path_is_its_last_writers_and_the_heaviest_comes_first() -> None:
    blame = blame_of(played((3, {"a": "x" * 30, "new": "y" * 10}), (5, {"new": "z" * 60})))
    assert blame.writes == (Write("new", "created", 60, 5, 1), Write("a", "modified", 30, 3, 0))
    assert blame.shares == {3: 30 / 90, 5: 60 / 90}
    assert (blame.rest, blame.unknown, blame.unseen_turns, blame.paths) == ((), None, 0, 2)
    assert blame.mean_lag(6) == pytest.approx((3 * 30 + 1 * 60) / 90)


def test_what_was_deleted_counts_a_byte_and_what_was_changed_back_nothing() -> None:
    blame = blame_of(played((1, {"a": "", "b": "new"}), (2, {"b": "", "c": "one"}), (4, {"c": "three"})))
    assert blame.writes == (Write("c", "created", 5, 4, 2), Write("a", "deleted", 0, 1, 0))
    assert blame.shares == {1: 1 / 6, 4: 5 / 6}
    assert blame_of(played((1, {"a": "other"}), (2, {"a": "a0"}))) == Blame()
    assert Blame().shares == {} and Blame().mean_lag(9) == 0


def test_a_write_that_nobody_signed_is_of_no_version_and_of_no_age() -> None:
    rollout = PartialRollout("prompt", "group", prompt_tokens=[7])
    rollout.snapshots = {
        "s0": Snapshot("s0", "d0"),
        "s1": Snapshot("s1", "d1", "s0", (Change("old", "created", 10, "", "o"),), version=2, turn=0),
        "s2": Snapshot("s2", "d2", "s1", (Change("new", "created", 30, "", "n"),), version=None, turn=1),
    }
    rollout.snapshot = "s2"
    blame = blame_of(rollout)
    assert list(blame.shares.items()) == [(None, 0.75), (2, 0.25)]
    assert blame.mean_lag(6) == 4 * 0.25


def test_states_that_do_not_lead_back_to_the_start_are_nobodys() -> None:
    rollout = played((1, {"a": "x"}), (2, {"a": "y"}))
    rollout.forget("s1")
    assert blame_of(rollout) == Blame(unknown="snapshot s1 is not recorded, so who made s2 is unknown")
    # A transcript that went on in an environment that started anew.
    anew = played((1, {"a": "x"}))
    anew.enter(Snapshot("fresh", "d0"))
    assert blame_of(anew) == Blame(unknown="its states do not lead back to the task's start")
    assert blame_of(PartialRollout("prompt", "group")).unknown == "no state of its environment was recorded"


def test_turns_after_the_newest_state_are_counted() -> None:
    rollout = played((1, {"a": "x"}), action=2)
    assert blame_of(rollout).unseen_turns == 0  # its action has not been executed
    rollout.finish_action()
    rollout.append_observation([9])
    rollout.status = Status.COMPLETED
    assert blame_of(rollout).unseen_turns == 1
    rollout.begin_turn()
    rollout.append_action([1], [-0.5], [Span(3, 0, 1)])
    rollout.finish_action()
    rollout.append_observation([9])
    assert blame_of(rollout) == Blame((Write("a", "modified", 1, 1, 0),), unseen_turns=2)


def test_an_environment_without_any_snapshot_says_so() -> None:
    rollout = PartialRollout("prompt", "group", prompt_tokens=[7])
    act(rollout, 1)
    rollout.finish_action()
    rollout.append_observation([9])
    assert blame_of(rollout) == Blame(unknown="no state of its environment was recorded", unseen_turns=1)


def test_of_20_000_paths_the_heaviest_are_named_and_shares_stay_exact() -> None:
    writes = [{f"{turn}/{n}": "x" * (1 + (n * 7 + turn) % 50) for n in range(2_000)} for turn in range(10)]
    rollout = played(*((turn // 2, each) for turn, each in enumerate(writes)))
    every = surviving_writes(chain(rollout.snapshots, rollout.newest_snapshot))
    blame = blame_of(rollout)
    assert (len(every), blame.paths, len(blame.writes)) == (20_000, 20_000, MOST_PATHS)
    assert blame.shares == shares(every)
    assert min(write.weight for write in blame.writes) == max(write.weight for write in every) == 50
    assert len(blame.rest) == 10
    assert sum(rest.bytes for rest in blame.rest) + sum(w.bytes for w in blame.writes) == sum(
        w.bytes for w in every
    )
    assert sum(map(blame.share, (*blame.writes, *blame.rest))) == pytest.approx(1)
    assert len(json.dumps(blame.to_json())) < 20_000


def test_paths_that_are_very_long_are_fewer() -> None:
    most = MOST_PATH_CHARACTERS // 4_000
    blame = blame_of(played((1, {f"{n}" * 4_000: "x" for n in range(10)})))
    assert len(blame.writes) == most == 4
    assert blame.rest == (Rest(1, 0, 10 - most, 10 - most, 10 - most),)


def test_hostile_paths_go_through_json() -> None:
    blame = blame_of(played((1, dict.fromkeys(HOSTILE, "x"))))
    assert sorted(write.path for write in blame.writes) == sorted(HOSTILE)
    assert Blame.from_json(json.loads(json.dumps(blame.to_json()))) == blame


def test_a_rollout_that_waits_has_a_blame_too() -> None:
    rollout, world = PartialRollout("prompt", "group", prompt_tokens=[7]), World()
    world.begin(rollout)
    world.turn(rollout, 4, a="x")
    act(rollout, 5)
    rollout.status = Status.ABORTED
    assert blame_of(rollout).shares == {4: 1.0}
