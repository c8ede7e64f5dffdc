"""What a host job hands to the layer."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from midstream.conf.compose import layer_config
from midstream.conf.errors import ConfigError
from midstream.conf.schema import LayerConfig


def test_a_run_directory_is_all_that_a_host_must_name():
    config = layer_config({"run_dir": "/runs/a"})
    assert config == LayerConfig(run_dir=Path("/runs/a"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "midstream.run_dir: got None; name a folder"),
        (None, "midstream: got None; use a mapping of settings"),
        ({"run_dir": "/r", "max_turn": 3}, "midstream.max_turn: got 3; there is no such key"),
        ({"run_dir": "/r", "max_turns": 3}, "did you mean midstream.turns.max_turns?"),
        ({"run_dir": "/r", "turns": {"max_turns": 0}}, "midstream.turns.max_turns: got 0; use 1 or more"),
        ({"run_dir": "/r", "max_attempts": "3"}, "midstream.max_attempts: got '3'; use a whole number"),
    ],
)
def test_faults_are_named_by_the_key_in_the_hosts_file(values, message):
    with pytest.raises(ConfigError) as raised:
        layer_config(values)
    assert message in str(raised.value)


def test_long_values_are_cut_in_messages():
    with pytest.raises(ConfigError) as raised:
        layer_config({"run_dir": "/r", "resume_policy": "x" * 10_000})
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("curriculum", "fix"),
    [
        ({"outcome": {"by": "spread"}}, "outcome.by=threshold"),
        ({"filter": {"zero_variance": "keep"}}, "filter.zero_variance=drop"),
    ],
)
def test_groups_are_given_up_only_where_that_means_something(curriculum, fix):
    early_stop = {"min_informative": 0.1}
    layer_config({"run_dir": "/r", "curriculum": {"early_stop": early_stop}})
    layer_config({"run_dir": "/r", "curriculum": curriculum})
    with pytest.raises(ConfigError) as raised:
        layer_config({"run_dir": "/r", "curriculum": {**curriculum, "early_stop": early_stop}})
    message = str(raised.value)
    assert "midstream.curriculum.early_stop.min_informative: got 0.1" in message
    assert f"midstream.curriculum.{fix}" in message


@pytest.mark.parametrize(("band", "key"), [({"low": 0.1}, "low: got 0.1"), ({"high": 0.9}, "high: got 0.9")])
def test_a_band_of_pass_rates_needs_successes(band, key):
    layer_config({"run_dir": "/r", "curriculum": {"filter": band}})
    with pytest.raises(ConfigError) as raised:
        layer_config({"run_dir": "/r", "curriculum": {"filter": band, "outcome": {"by": "spread"}}})
    assert [str(problem) for problem in raised.value.problems] == [
        f"midstream.curriculum.filter.{key}; use {0 if 'low' in band else 1}, or "
        "midstream.curriculum.outcome.by=threshold: a band of pass rates needs successes"
    ]


def test_a_configuration_does_not_change_under_its_readers():
    config = layer_config({"run_dir": "/r"})
    with pytest.raises(ValidationError, match="frozen"):
        config.max_attempts = 5
