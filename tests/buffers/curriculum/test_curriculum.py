"""What is chosen: what is known of prompts decides, nobody is starved, and what was saved goes on alike."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.buffers.curriculum.book import Cost
from midstream.buffers.curriculum.curriculum import Outcome
from midstream.buffers.curriculum.history import HISTORY, STATE, keep_step
from midstream.buffers.curriculum.preview import preview
from midstream.buffers.curriculum.state import StateError, restore, save
from midstream.buffers.curriculum.walk import Walk
from tests.buffers.curriculum.streams import SIZE, config, curriculum, drawn, know, outcome, prompts


def test_prompts_that_teach_nothing_are_passed_over() -> None:
    of = prompts(40)
    one = curriculum(of, config(gate={"explore": 0.0}, sampler={"by": "uniform"}))
    know(one, of, {position: 8 if position < 20 else 4 for position in range(40)})
    taken = one.take(60)
    assert set(taken) == set(range(20, 40))
    [tally] = one.end_step().values()
    assert (tally.played, tally.explored, tally.relaxed) == (60, 0, 0) and tally.skipped >= 20


def test_what_has_become_informative_is_found_again() -> None:
    of = prompts(10)
    one = curriculum(of, config(gate={"explore": 0.5, "revisit_epochs": 1_000}))
    know(one, of, {position: 8 if position < 9 else 4 for position in range(10)})
    taken = one.take(40)
    assert sum(position < 9 for position in taken) == 20
    [tally] = one.end_step().values()
    assert tally.explored == 20


@pytest.mark.parametrize(("by", "candidates"), [("uniform", 1), ("information", 8)])
def test_the_floor_of_exploration_holds_where_few_prompts_are_passed_over(by: str, candidates: int) -> None:
    of = prompts(400)
    one = curriculum(
        of,
        config(gate={"explore": 0.02, "revisit_epochs": 10**6}, sampler={"by": by, "candidates": candidates}),
    )
    know(one, of, {position: 8 if position < 20 else 4 for position in range(400)}, groups=20)
    one.take(1_000)
    [tally] = one.end_step().values()
    assert tally.explored == pytest.approx(20, abs=4)


@pytest.mark.parametrize("by", ["uniform", "information"])
def test_what_is_rarely_passed_over_has_its_share_of_exploration_too(by: str) -> None:
    of = prompts(100)
    one = curriculum(of, config(sampler={"by": by}, gate={"explore": 0.05, "revisit_epochs": 10_000}))
    know(one, of, {position: 8 if position < 20 else 4 for position in range(100)}, groups=20)
    assert sum(position < 20 for position in one.take(400)) == pytest.approx(20, abs=1)


def test_exploration_makes_up_for_little_of_what_could_not_be_explored() -> None:
    of = prompts(20)
    one = curriculum(of, config(gate={"explore": 0.1}))
    one.take(400)
    know(one, of, {position: 8 if position < 10 else 4 for position in range(20)}, groups=20)
    assert sum(position < 10 for position in one.take(20)) <= 6


def test_an_exploration_of_none_is_none_and_the_gate_opens_before_a_run_ends() -> None:
    of = prompts(6)
    one = curriculum(of, config(gate={"explore": 0.0, "revisit_epochs": 10_000}))
    know(one, of, dict.fromkeys(range(6), 8), groups=20)
    assert len(one.take(12)) == 12
    [tally] = one.end_step().values()
    assert (tally.relaxed, tally.explored) == (12, 0)


def test_information_prefers_what_varies_and_costs_little() -> None:
    of = prompts(8)
    one = curriculum(
        of, config(sampler={"by": "information", "candidates": 8}, gate={"min_informative": 0.0})
    )
    know(one, of, dict.fromkeys(range(8), 7))
    know(one, of, {3: 4}, groups=20)
    assert one.take(1) == [3]
    for _ in range(20):
        one.observe(outcome(of, 3, 4, tokens=1_000.0))
    assert one.take(1) != [3]


def test_of_equals_the_one_that_was_passed_over_most_often_is_played() -> None:
    of = prompts(8)
    one = curriculum(of, config(sampler={"candidates": 8}), shuffle=False)
    assert one.take(8) == list(range(8))


def test_a_prompt_that_was_never_played_is_not_taken_to_cost_nothing() -> None:
    of = prompts(8)
    one = curriculum(of, config(sampler={"by": "information"}, gate={"min_informative": 0.0}))
    for position in range(7):
        one.observe(outcome(of, position, 8, tokens=1_000.0))
    one.observe(outcome(of, 3, 4, tokens=1_000.0))
    # Its prior says that the last one is solved, like the others.
    assert one.take(1) == [3]


def test_no_prompt_is_played_again_while_a_group_of_it_is_on_its_way() -> None:
    of = prompts(64)
    one = curriculum(of)
    know(one, of, {position: position % 7 + 1 for position in range(64)}, groups=3)
    assert len(set(one.take(64))) == 64
    assert len(one.take(3)) == 3, "unless all are"
    assert sum(tally.relaxed for tally in one.end_step().values()) == 0
    one.observe(outcome(of, 17, 4))
    assert one.take(1) == [17]


def test_a_group_that_never_comes_back_keeps_its_prompt_for_an_epoch_at_most() -> None:
    of = prompts(8)
    one = curriculum(of, config(gate={"min_informative": 0.0}, sampler={"by": "uniform"}))
    [lost] = one.take(1)
    taken = []
    for _ in range(24):
        [position] = one.take(1)
        taken.append(position)
        if position != lost:
            one.observe(outcome(of, position, 4))
    assert lost not in taken[:6] and lost in taken


def test_a_target_takes_the_nearest_pass_rate() -> None:
    of = prompts(8)
    one = curriculum(of, config(sampler={"by": "target", "target": 0.75, "candidates": 8}))
    know(one, of, {position: position for position in range(8)}, groups=10)
    assert one.take(1) == [6]


def test_weights_share_the_groups_among_sources() -> None:
    of = prompts(30, [0] * 20 + [1] * 8 + [2] * 2, ["web", "code", "math"])
    one = curriculum(of, config(sampler={"weights": {"code": 2.0, "math": 1.0, "web": 0.0}}))
    shares = Counter(of.names[of.sources[position]] for position in drawn(one, 300))
    assert shares == {"code": 200, "math": 100}
    one.configure(config(sampler={"weights": {"web": 0.0}}))
    shares = Counter(of.names[of.sources[position]] for position in drawn(one, 50))
    assert shares == {"code": 25, "math": 25}
    one.configure(config(sampler={"weights": {"web": 3.0}}))
    shares = Counter(of.names[of.sources[position]] for position in drawn(one, 50))
    assert shares == {"web": 30, "code": 10, "math": 10}
    one.configure(config())
    shares = Counter(of.names[of.sources[position]] for position in drawn(one, 300))
    assert shares == pytest.approx({"web": 200, "code": 80, "math": 20}, abs=40)


@pytest.mark.parametrize("weight", [1.0, 100.0])
def test_a_source_with_nothing_to_offer_leaves_its_turn(weight: float) -> None:
    of = prompts(20, [0] * 10 + [1] * 10, ["solved", "open"])
    one = curriculum(of, config(sampler={"weights": {"solved": weight, "open": 1.0}}, gate={"explore": 0.0}))
    know(one, of, {position: 8 if position < 10 else 4 for position in range(20)}, groups=3)
    assert all(position >= 10 for position in one.take(40))
    assert sum(tally.relaxed for tally in one.end_step().values()) == 0


def test_a_turn_that_was_left_is_no_debt() -> None:
    of = prompts(40, [0] * 20 + [1] * 20, ["solved", "open"])
    one = curriculum(of, config(sampler={"weights": {"solved": 1.0, "open": 1.0}}, gate={"explore": 0.0}))
    know(one, of, {position: 8 if position < 20 else 4 for position in range(40)}, groups=3)
    assert all(position >= 20 for position in drawn(one, 40))
    one.configure(one.config.model_copy(update={"gate": config(gate={"min_informative": 0.0}).gate}))
    assert Counter(of.names[of.sources[position]] for position in drawn(one, 20)) == {
        "solved": 10,
        "open": 10,
    }


def test_weights_of_sources_that_are_not_there_stop_nothing() -> None:
    of = prompts(5)
    assert len(curriculum(of, config(sampler={"weights": {"a": 0.0, "other": 1.0}})).take(10)) == 10


def test_failures_of_infrastructure_say_nothing_of_a_prompt() -> None:
    of = prompts(3)
    one = curriculum(of)
    before = one.belief(int(of.digests[1]))
    assert one.observe(Outcome(int(of.digests[1]), [], Cost()))
    assert one.belief(int(of.digests[1])) == before
    [tally] = one.end_step().values()
    assert (tally.ended, tally.failed, tally.metrics(one.calibrations["a"])["informative"]) == (1, 1, 0.0)


def test_rewards_of_many_values_count_by_whether_groups_inform() -> None:
    of = prompts(2)
    one = curriculum(of, config(outcome={"by": "spread"}))
    for _ in range(20):
        one.observe(Outcome(int(of.digests[0]), [0.3, 0.31, 0.29], Cost()))
        one.observe(Outcome(int(of.digests[1]), [0.3, 0.3, 0.3], Cost()))
    assert one.chance(0) > 0.9 and one.chance(1) < 0.1
    assert set(one.take(50)) == {0}


def test_a_prompt_that_is_not_in_the_dataset_is_told() -> None:
    assert not curriculum(prompts(3)).observe(Outcome(12345, [1.0, 0.0], Cost()))


def test_a_dataset_without_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        curriculum(prompts(0))


def test_a_source_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no name"):
        curriculum(prompts(2, [0, 1], ["a", ""]))


def test_names_and_seeds_may_be_any() -> None:
    of = prompts(6, [0, 0, 1, 1, 2, 2], ["half a \ud83d", "a/b\n", "ä"])
    one = curriculum(of, config(sampler={"by": "uniform", "weights": {"ä": 1.0}}), seed=-3)
    assert Counter(one.take(6)) == dict.fromkeys(range(6), 1)


def test_pass_rates_are_those_of_each_source() -> None:
    of = prompts(9, [2, 0, 2, 0, 2, 0, 2, 0, 2], ["low", "none", "high"])
    one = curriculum(of)
    know(one, of, {0: 8, 1: 0, 2: 8, 3: 0, 4: 8}, groups=9)
    rates = one.pass_rates()
    assert (sum(rates["low"][:2]), sum(rates["low"])) == (2, 2)
    assert (sum(rates["high"][8:]), sum(rates["high"])) == (3, 3)
    assert sum(rates["none"]) == 0


def test_equal_prompts_are_one_and_come_up_as_often_as_they_stand_there() -> None:
    of = prompts(4)
    of.digests[2] = of.digests[1]
    one = curriculum(of, config(gate={"min_informative": 0.0}, sampler={"by": "uniform"}))
    know(one, of, {1: 8}, groups=3)
    assert one.chance(1) == one.chance(2) < one.chance(0)
    assert Counter(drawn(one, 8)) == dict.fromkeys(range(4), 2)


RATES = st.lists(st.sampled_from([0, 1, 4, 7, 8]), min_size=3, max_size=15)


@settings(max_examples=25, deadline=None)
@given(
    solved=RATES,
    by=st.sampled_from(["uniform", "information", "target"]),
    gate=st.sampled_from(["mean", "thompson"]),
    most=st.integers(1, 4),
    candidates=st.integers(1, 9),
    weights=st.sampled_from([{}, {"x": 1.0, "y": 3.0}, {"y": 1.0}]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_prompt_is_starved(
    solved: list[int], by: str, gate: str, most: int, candidates: int, weights: dict[str, float], seed: int
) -> None:
    """It is played at the latest when it comes up after so many epochs without it, whatever is known of all."""
    count = len(solved)
    of = prompts(count, [position % 2 for position in range(count)], ["x", "y"])
    one = curriculum(
        of,
        config(
            gate={"by": gate, "revisit_epochs": most, "explore": 0.1},
            sampler={"by": by, "candidates": candidates, "weights": weights},
        ),
        seed=seed,
    )
    played: set[int] = set()
    # Each draw takes a walk one entry further at least, and each walk gets a quarter of the draws at least.
    for _ in range((most + 4) * count + 9):
        [position] = one.take(1)
        played.add(position)
        one.observe(outcome(of, position, solved[position]))
        waited = one.drawing.begun - one.book.played_at
        assert waited.max() <= (most + 4) * count + 8
    assert played == set(range(count))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), solved=RATES)
def test_a_restored_state_gives_the_same_decisions(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, solved: list[int]
) -> None:
    path = tmp_path_factory.mktemp("state") / "state.npz"
    of = prompts(len(solved), [position % 2 for position in range(len(solved))], ["x", "y"])
    parts = config(
        gate={"by": data.draw(st.sampled_from(["mean", "thompson"])), "explore": 0.2},
        sampler={"weights": data.draw(st.sampled_from([{}, {"x": 1.0, "y": 2.0}]))},
    )
    one = curriculum(of, parts)
    for version in range(data.draw(st.integers(1, 6))):
        one.advance(version)
        for position in one.take(5):
            one.observe(outcome(of, position, solved[position]))
    save(one, path)
    other = curriculum(of, parts, seed=99)
    other.drawing.walks = curriculum(of, parts).drawing.walks  # the order is of the job's seed
    restore(other, path)
    for version in range(6, 9):
        for each in (one, other):
            each.advance(version)
        taken = one.take(7)
        assert other.take(7) == taken
        for position in taken:
            for each in (one, other):
                each.observe(outcome(of, position, solved[position]))
    assert [vars(source) for source in one.sources.values()] == [
        vars(source) for source in other.sources.values()
    ]


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(list(range(6))))
def test_groups_of_one_version_commute(order: list[int]) -> None:
    of, forget = prompts(6), {"surprise": None}
    counts = [8, 0, 4, 7, 1, 5]
    one, other = (curriculum(of, config(forget=forget)) for _ in range(2))
    for each, positions in ((one, range(6)), (other, order)):
        for position in positions:
            each.observe(outcome(of, position, counts[position]))
    for position in range(6):
        assert one.belief(int(of.digests[position])) == pytest.approx(
            other.belief(int(of.digests[position])), rel=1e-9
        )


def test_a_dataset_that_changed_keeps_what_is_known_of_the_prompts_that_stayed(tmp_path: Path) -> None:
    of = prompts(10)
    one = curriculum(of)
    know(one, of, {2: 8, 3: 1})
    save(one, tmp_path / "state.npz")
    more = prompts(14)
    other = curriculum(more)
    assert restore(other, tmp_path / "state.npz") == 10
    assert other.belief(int(of.digests[2])) == one.belief(int(of.digests[2]))
    assert other.chance(12) == other.chance(13)


@pytest.mark.parametrize("cut", [0, 10, 300, -1])
def test_a_damaged_state_is_told_and_changes_nothing(tmp_path: Path, cut: int) -> None:
    of, path = prompts(5), tmp_path / "state.npz"
    one = curriculum(of)
    know(one, of, {1: 8})
    save(one, path)
    path.write_bytes(path.read_bytes()[:cut])
    other = curriculum(of)
    with pytest.raises(StateError, match=r"state\.npz is damaged.*remove it"):
        restore(other, path)
    assert other.take(5) == curriculum(of).take(5)


def test_counts_of_another_kind_are_refused(tmp_path: Path) -> None:
    of, path = prompts(5), tmp_path / "state.npz"
    save(curriculum(of), path)
    with pytest.raises(StateError, match="it counts by midstream.curriculum.outcome.by=threshold"):
        restore(curriculum(of, config(outcome={"by": "spread"})), path)


def test_numbers_that_no_book_holds_are_damage(tmp_path: Path) -> None:
    of, path = prompts(5), tmp_path / "state.npz"
    one = curriculum(of)
    know(one, of, {1: 8})
    one.book.seconds[2] = np.nan
    save(one, path)
    other = curriculum(of)
    with pytest.raises(StateError, match="not all finite"):
        restore(other, path)
    assert not other.book.successes.any()


def test_what_is_known_of_prompts_outlasts_a_new_name_of_their_source(tmp_path: Path) -> None:
    of, forget = prompts(10), config(forget={"half_life": 1.0})
    one = curriculum(of, forget)
    for version in range(60):
        one.advance(version)
    know(one, of, {2: 8})
    save(one, tmp_path / "state.npz")
    other = curriculum(prompts(10, [0, 0, 1] + [0] * 7, ["a", "other"]), forget)
    restore(other, tmp_path / "state.npz")
    row = other.book.row_of(int(of.digests[2]))
    assert row is not None and (other.book.successes[row], other.book.failures[row]) == (16, 0)
    known = other.sources["other"]
    assert known.remembered(16.0, 0.0, float(other.book.noted_at[row]), 0) == pytest.approx((16, 0))
    for version in (60, 61, 62):
        other.advance(version)
    assert known.remembered(16.0, 0.0, float(other.book.noted_at[row]), 0) == pytest.approx((4, 0))


def test_a_torn_line_of_the_history_takes_no_other_with_it(tmp_path: Path) -> None:
    one, path = curriculum(prompts(4)), tmp_path / HISTORY
    for step in range(3):
        keep_step(tmp_path, step, one, one.end_step(), with_state=False)
        if step == 1:
            path.write_bytes(path.read_bytes()[:-40])
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["step"], json.loads(last)["step"]) == (0, 2)
    with pytest.raises(ValueError):
        json.loads(torn)


def test_a_preview_says_what_other_settings_would_play(tmp_path: Path) -> None:
    of = prompts(200)
    one = curriculum(of)
    know(one, of, {position: 8 if position < 100 else 4 for position in range(200)}, groups=4)
    shut = config(sampler={"by": "uniform"})
    opened = config(gate={"min_informative": 0.0}, sampler={"by": "uniform"})
    assert preview(tmp_path, opened, shut) is None
    keep_step(tmp_path / "curriculum", 3, one, one.end_step(), with_state=True)
    before = (tmp_path / "curriculum" / STATE).read_bytes()
    found = preview(tmp_path, opened, shut)
    assert found is not None
    assert found[0].informative == pytest.approx(0.52, abs=0.05) and found[0].played == 1.0
    assert found[1].informative > 0.9 and found[1].played == pytest.approx(0.5, abs=0.05)
    assert (found[1].prompts, found[1].known) == (200, 200)
    assert (tmp_path / "curriculum" / STATE).read_bytes() == before


def test_a_preview_of_a_run_in_which_all_is_solved_looks_at_few_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, came_up, following = prompts(3_000), Counter[str](), Walk.next
    one = curriculum(of)
    know(one, of, dict.fromkeys(range(3_000), 8), groups=1)
    keep_step(tmp_path / "curriculum", 0, one, one.end_step(), with_state=True)

    def counted(walk: Walk) -> int:
        came_up["prompts"] += 1
        return following(walk)

    monkeypatch.setattr(Walk, "next", counted)
    found = preview(tmp_path, config(), config(gate={"min_informative": 0.9}))
    assert found is not None and found[1].played < 0.01
    # A batch more than what is enough, twice.
    assert came_up["prompts"] <= 2 * (20_000 + 5 * 3 * 2_000)


def test_predictions_are_calibrated_on_rates_that_stay() -> None:
    of, random = prompts(300), np.random.default_rng(1)
    rates = np.where(random.random(300) < 0.5, 1.0, random.uniform(0.1, 0.9, 300))
    one = curriculum(of)
    for version in range(100):
        one.advance(version)
        for position in one.take(16):
            one.observe(outcome(of, position, int(random.binomial(SIZE, rates[position]))))
    assert one.calibrations["a"].error < 0.05
