"""Settings changed while a job runs: who may change what, what is in force, and what the files say of it."""

import os
import socket
from pathlib import Path

import pytest

from midstream.conf.control.acknowledged import acknowledgement_in
from midstream.conf.control.job import Control
from midstream.conf.control.live import live_settings
from midstream.conf.control.strict import ControlError
from midstream.conf.control.tuning import chain_of, changed, commit, undone
from midstream.conf.control.wanted import wanted_values
from midstream.conf.errors import ConfigError
from tests.conf.tuned import control_of, layer_config, proposed, tuned, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def control(run: Path) -> Control:
    return control_of(run)


def fault_of(run: Path, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        proposed(run, *words)
    return str(raised.value).splitlines()


def undo(run: Path) -> None:
    commit(run, undone(chain_of(run)))


def test_all_that_is_to_be_steered_can_be_and_nothing_else() -> None:
    sections = {key.rpartition(".")[0] for key in live_settings()}
    steered = {f"curriculum.{name}" for name in ("forget", "gate", "sampler", "filter", "early_stop")}
    assert sections == steered | {"bounds"}
    assert live_settings()["bounds.token"].range == "integer or null, ≥ 0"
    assert live_settings()["curriculum.gate.by"].range == "mean | thompson"
    assert live_settings()["curriculum.gate.by"].default == "mean"


def test_a_change_is_in_force_from_the_next_look_on(run: Path, control: Control) -> None:
    assert (control.read().version, control.read().changed) == (0, False)
    change = tuned(run, "midstream.curriculum.gate.min_informative=0.4", "bounds.token=null")
    settled = control.read()
    assert (settled.version, settled.changed, settled.alarms) == (1, True, ())
    assert settled.layer.curriculum.gate.min_informative == 0.4 and settled.layer.bounds.token is None
    assert settled.layer.bounds.trajectory == 16
    assert not control.read().changed
    assert change.who.endswith(f"@{socket.gethostname()}") and change.time.endswith("+00:00")
    assert change.told == "bounds.token 16 → null, curriculum.gate.min_informative 0.3 → 0.4"
    assert change.values == {"bounds.token": None, "curriculum.gate.min_informative": 0.4}


def test_a_value_that_is_the_jobs_own_again_is_named_no_more(run: Path, control: Control) -> None:
    tuned(run, "bounds.token=8", "bounds.trajectory=9")
    assert tuned(run, "bounds.token=16").values == {"bounds.trajectory": 9}
    chain = chain_of(run)
    assert changed(chain, *wanted_values(["bounds.token=16"], chain.layer)) is None
    assert control.read().layer.bounds.token == 16


def test_entries_of_a_mapping_are_changed_alone(run: Path, control: Control) -> None:
    weights = "curriculum.sampler.weights"
    tuned(run, f"{weights}={{math: 1, code: 2}}")
    tuned(run, f"{weights}.math=3", f"{weights}.gsm8k/main v1.0=0.5", f"{weights}.code=null")
    assert control.read().layer.curriculum.sampler.weights == {"math": 3, "gsm8k/main v1.0": 0.5}


def test_all_that_is_wrong_is_said_at_once(run: Path, control: Control) -> None:
    assert fault_of(
        run,
        "min_informative=0.4",
        "bounds.tokn=3",
        "curriculum.gate=3",
        "max_attempts=5",
        "curriculum.enabled=true",
        "bounds.token",
        "bounds.passed_over=1,2",
        "bounds.beyond='x",
        "curriculum.gate.explore=2",
        "curriculum.gate.explore=0.1",
        "curriculum.sampler.by=targt",
        "bounds.trajectory=99999999999999999999",
        "curriculum.forget.surprise=inf",
    ) == [
        "min_informative: got '0.4'; there is no such key, did you mean curriculum.gate.min_informative or "
        "curriculum.early_stop.min_informative? (--list shows all)",
        "bounds.tokn: got '3'; there is no such key, did you mean bounds.token? (--list shows all)",
        "curriculum.gate: got '3'; name one of its settings: curriculum.gate.min_informative, curriculum.gate.by, "
        "curriculum.gate.explore, curriculum.gate.revisit_epochs",
        "max_attempts: got '5'; it cannot be changed while the job runs: set midstream.max_attempts in its "
        "configuration, and start it again",
        "curriculum.enabled: got 'true'; it cannot be changed while the job runs: set midstream.curriculum.enabled "
        "in its configuration, and start it again",
        "change: got 'bounds.token'; write key=value, with quotes around the whole for your shell",
        "bounds.passed_over: got '1,2'; write one value, as in YAML (several are written [a, b])",
        "bounds.beyond: got \"'x\"; write one value, as in YAML (token recognition error at: ''x')",
        "curriculum.gate.explore: got '0.1'; give it once",
        "bounds.trajectory: got '99999999999999999999'; write one value, as in YAML (of at most 63 bits)",
        "curriculum.forget.surprise: got inf; use a finite number",
        "curriculum.gate.explore: got 2; use 0.5 or less",
        "curriculum.sampler.by: got 'targt'; use 'uniform', 'information' or 'target' (did you mean 'target'?)",
    ]
    assert fault_of(run, "=3", "curriculum.sampler.weights=math:2") == [
        "change: got '=3'; write key=value, with quotes around the whole for your shell",
        "curriculum.sampler.weights: got 'math:2'; use a mapping, such as {a: 1}",
    ]
    assert fault_of(run, "curriculum.sampler.weights.math=-1") == [
        "curriculum.sampler.weights.math: got -1.0; use 0 or more"
    ]
    assert chain_of(run).entries == ()


def test_values_that_contradict_settings_of_the_job_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    control_of(run, resume_policy="rewind")
    [fault] = fault_of(run, "bounds.environment=3")
    assert fault.startswith("policies.rewind.max_lag: got 8; use at most midstream.bounds.environment=3")
    [fault] = fault_of(
        run, "curriculum.early_stop.min_informative=0.1", "curriculum.filter.zero_variance=keep"
    )
    assert "what is given up cannot be kept" in fault


def test_undo_goes_back_change_by_change(run: Path, control: Control) -> None:
    for lag in (1, 2, 3):
        tuned(run, f"bounds.token={lag}")
    undo(run)
    assert control.read().layer.bounds.token == 2
    tuned(run, "bounds.token=4")
    seen = []
    for _ in range(3):
        undo(run)
        seen.append((control.read().layer.bounds.token, chain_of(run).valid[-1].undoes))
    assert seen == [(2, 5), (1, 2), (16, 1)]
    with pytest.raises(ControlError, match="no change left to undo"):
        undo(run)
    assert [change.version for change in chain_of(run).valid] == list(range(1, 9))


def test_a_restart_keeps_what_was_tuned_on_top_of_new_settings(run: Path, control: Control) -> None:
    tuned(run, "bounds.token=8")
    tuned(run, "bounds.environment=4")
    control = control_of(run, bounds={"trajectory": 12})
    settled = control.read()
    assert (
        settled.changed
        and settled.layer.bounds
        == layer_config(run, bounds={"trajectory": 12, "token": 8, "environment": 4}).bounds
    )
    assert chain_of(run).layer == settled.layer


def test_a_restart_with_settings_that_do_not_admit_a_change_goes_on_with_the_one_before(
    run: Path, control: Control
) -> None:
    tuned(run, "bounds.token=8")
    tuned(run, "bounds.environment=4")
    control = control_of(run, resume_policy="rewind")
    settled = control.read()
    assert (settled.version, settled.layer.bounds.token, settled.layer.bounds.environment) == (1, 8, 16)
    assert ["policies.rewind.max_lag: got 8" in alarm for alarm in settled.alarms] == [True]
    chain = chain_of(run)
    assert (chain.version, chain.layer) == (1, settled.layer)
    assert tuned(run, "bounds.token=7").version == 3
    assert control.read().version == 3


def test_the_job_says_what_it_has_taken_up_and_what_not(run: Path, control: Control) -> None:
    assert acknowledgement_in(run) is None
    tuned(run, "bounds.token=8")
    control.read()
    control.acknowledge(41)
    said = acknowledgement_in(run)
    assert said is not None
    assert (said.version, said.step, said.pid, said.refused) == (1, 41, os.getpid(), [])
    write(run, 2, b"half")
    control.read()
    control.acknowledge(42)
    said = acknowledgement_in(run)
    assert said is not None and (said.version, said.step) == (1, 42)
    assert [refusal.file for refusal in said.refused] == ["000002.json"]
    tuned(run, "bounds.token=7")
    control.read()
    control.acknowledge(42)
    said = acknowledgement_in(run)
    assert said is not None and (said.version, said.refused) == (3, [])
    (run / "control" / "acknowledged.json").write_text("[" * 100_000)
    assert acknowledgement_in(run) is None
