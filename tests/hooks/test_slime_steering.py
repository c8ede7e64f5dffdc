"""A slime job takes up what is changed while it runs, tells its parts, and says so."""

import logging
from argparse import Namespace
from pathlib import Path

import pytest

from midstream.buffers.journal.errors import JournalInUse
from midstream.conf.control.acknowledged import acknowledgement_in
from midstream.conf.control.tuning import chain_of
from midstream.conf.schema import LayerConfig
from midstream.hooks.slime import restart
from midstream.hooks.slime.data_source import DataSource
from midstream.hooks.slime.settings import layer_of, steering_of
from midstream.hooks.slime.steering import Steering
from tests.conf.tuned import tuned, write
from tests.hooks.host import number_args


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return number_args(tmp_path, {"bounds": {"token": 9}})


def test_a_change_reaches_all_parts_at_the_next_step(args: Namespace, tmp_path: Path) -> None:
    steering = steering_of(args)
    assert steering_of(args) is steering
    seen: list[int | None] = []
    steering.subscribe(lambda layer: seen.append(layer.bounds.token))
    steering.poll(0)
    tuned(tmp_path, "bounds.token=8")
    assert seen == [9] and steering.layer() == layer_of(args)
    steering.poll(1)
    steering.poll(2)
    assert seen == [9, 8] and steering.layer().bounds.token == 8
    assert steering.metrics() == {"control/version": 1, "control/refused": 0}


def test_a_change_is_acknowledged_when_all_parts_have_it(args: Namespace, tmp_path: Path) -> None:
    steering = steering_of(args)
    steering.poll(0)
    told = []

    def when_told(_: LayerConfig) -> None:
        said = acknowledgement_in(tmp_path)
        told.append(said and said.version)

    steering.subscribe(when_told)
    tuned(tmp_path, "bounds.token=8")
    steering.poll(1)
    assert told == [0, 0]
    said = acknowledgement_in(tmp_path)
    assert said is not None and (said.version, said.step) == (1, 1)


def test_a_wrong_file_is_an_error_in_the_log_and_nothing_else(
    args: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steering = steering_of(args)
    seen: list[LayerConfig] = []
    steering.subscribe(seen.append)
    write(tmp_path, 1, b'{"version": 1, "values": {"bounds.token": 8')
    for step in range(3):
        steering.poll(step)
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "000001.json changes nothing: it is not sound JSON" in record.message
    assert len(seen) == 1 and steering.layer().bounds.token == 9
    assert steering.metrics() == {"control/version": 0, "control/refused": 1}
    said = acknowledgement_in(tmp_path)
    assert said is not None and [refusal.file for refusal in said.refused] == ["000001.json"]


def test_a_restarted_job_begins_with_what_was_changed(args: Namespace, tmp_path: Path) -> None:
    Steering(layer_of(args))
    tuned(tmp_path, "curriculum.gate.min_informative=0.4")
    again = Steering(layer_of(args))
    assert again.layer().curriculum.gate.min_informative == 0.4
    seen: list[float] = []
    again.subscribe(lambda layer: seen.append(layer.curriculum.gate.min_informative))
    again.poll(0)
    assert seen == [0.4]


def test_a_disk_that_refuses_stops_no_job(
    args: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "control").write_text("in the way")
    steering = steering_of(args)
    for step in range(3):
        steering.poll(step)
    assert steering.layer() == layer_of(args)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 3


def test_a_second_job_that_is_refused_leaves_the_configuration_of_the_first(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "_PATIENCE_S", 0.2)
    first = DataSource(args)
    with pytest.raises(JournalInUse):
        DataSource(number_args(tmp_path, {"bounds": {"token": 8}}))
    assert chain_of(tmp_path).base.bounds.token == 9, "who tunes would be told that 8 is in force already"
    first.close()
