"""Hydra overrides become a checked configuration, or an error that says what to change."""

import re

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from midstream.conf.compose import compose, compose_runs, write_resolved
from midstream.conf.errors import ConfigError
from midstream.conf.schema import JobConfig

STRATEGIES = ["wait", "discard", "restart", "continue", "rewind", "anchor", "ladder", "naive"]


def fault_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose(overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("job", "model"), [("demo", "small"), ("quick", "tiny"), ("smoke", "tiny"), ("mixed", "tiny")]
)
def test_every_job_composes_with_every_strategy(job, model):
    every = f"strategies=[{','.join(STRATEGIES)}]"
    runs = compose_runs([f"job={job}", f"model={model}", every])
    assert list(runs) == STRATEGIES
    assert [run.midstream.resume_policy for run in runs.values()] == STRATEGIES
    assert [run.strategy for run in runs.values()] == STRATEGIES


def test_runs_differ_in_nothing_but_the_strategy():
    runs = compose_runs(["job=demo", "seed=3"])
    own = {"strategy": True, "midstream": {"resume_policy", "run_dir"}}
    own["rollout"] = {"partial_rollout", "over_sampling_batch_size"}
    assert len({run.model_dump_json(exclude=own) for run in runs.values()}) == 1
    assert {run.midstream.run_dir for run in runs.values()} == {
        run.run_dir / name for name, run in runs.items()
    }


def test_what_teaches_nothing_is_dropped_by_one_strategy_and_passed_over_by_another():
    """All else is as in `continue`, so that the three can be compared."""
    runs = compose_runs(["job=mixed"])
    assert list(runs) == ["continue", "dapo", "curriculum"]
    own = {"strategy": True, "midstream": {"run_dir", "curriculum"}}
    own["rollout"] = {"dynamic_sampling_filter_path", "rollout_all_samples_process_path"}
    assert len({run.model_dump_json(exclude=own) for run in runs.values()}) == 1
    assert [run.midstream.curriculum.enabled for run in runs.values()] == [False, False, True]
    filters = [run.rollout.dynamic_sampling_filter_path for run in runs.values()]
    assert filters == [None, *["midstream.hooks.slime.filters.informative"] * 2]


def test_each_source_has_a_task_from_its_smallest_share_on():
    compose(["job=mixed", "tasks.count=7"])
    compose(["job=mixed", "tasks.held_out=2", "tasks.held_out_path=held_out.jsonl"])


def test_only_wait_launches_no_more_than_it_needs():
    runs = compose_runs(["rollout.rollout_batch_size=5", "trainer.num_minibatches=1"])
    launched = {name: run.rollout.over_sampling_batch_size for name, run in runs.items()}
    assert launched == {"wait": 5, "discard": 8, "restart": 8, "continue": 8}


def test_a_job_can_choose_a_model_and_an_override_beats_both():
    assert compose(["job=quick"]).model == compose(["model=tiny"]).model
    assert compose(["job=quick", "model=small"]).model == compose([]).model
    assert compose(["job=quick", "trainer.lr=1e-5"]).trainer.lr == 1e-5


def test_the_seed_reaches_what_is_drawn_anew_but_not_the_cached_warm_start():
    one, two = compose(["seed=1"]), compose(["seed=2"])
    assert (one.tasks.seed, one.rollout.rollout_seed) == (1, 1)
    assert (two.tasks.seed, two.rollout.rollout_seed) == (2, 2)
    assert (one.model, one.warm_start) == (two.model, two.warm_start)


@pytest.mark.parametrize("folder", ["a b/c", "it's", "comma,brace{}", "back\\slash", "trailing\\'"])
def test_run_directories_with_odd_names_survive_into_each_run(folder, tmp_path):
    given = tmp_path / folder
    quoted = str(given).replace("\\'", "\\\\\\'") if "\\'" in folder else str(given).replace("'", "\\'")
    (run,) = compose_runs([f"run_dir='{quoted}'", "strategies=[wait]"]).values()
    assert run.run_dir == given
    assert run.midstream.run_dir == given / "wait"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lrr=1e-4", "trainer.lrr: got 0.0001; there is no such key, did you mean trainer.lr?"),
        ("lr=1", "lr: got 1; there is no such key, did you mean warm_start.lr or trainer.lr?"),
        ("+xyz=red", "xyz: got 'red'; there is no such key, remove it"),
        ("job=demoo", "job: got 'demoo'; use one of demo, mixed, quick, smoke (did you mean 'demo'?)"),
        (
            "strategy=wiat",
            "strategy: got 'wiat'; use one of anchor, anchored, continue, curriculum, dapo, discard, ladder, naive",
        ),
        (
            "strategies=[wait,contnue]",
            "strategies: got 'contnue'; use one of anchor, anchored, continue, curriculum",
        ),
        ("strategies=[wait,wait]", "strategies: got ['wait', 'wait']; name each strategy once"),
        ("strategies=[]", "strategies: got []; use at least 1 item(s)"),
        ("midstream.resume_policy=resume", "midstream.resume_policy: got 'resume'; use 'wait', 'discard'"),
        ("midstream.resume_policy=rewnd", "or package.module:Class for your own (did you mean 'rewind'?)"),
        (
            "midstream.resume_policy=a.Policy",
            "midstream.resume_policy: got 'a.Policy'; use 'wait', 'discard'",
        ),
        (
            "midstream.bounds.max_lag=3",
            "did you mean midstream.policies.rewind.max_lag or midstream.policies.ladder.max_lag?",
        ),
        ("midstream.bounds.token=-1", "midstream.bounds.token: got -1; use 0 or more"),
        ("midstream.bounds.resumed_share=0", "midstream.bounds.resumed_share: got 0; use a value above 0"),
        ("midstream.policies.anchor.prefix=kept", "prefix: got 'kept'; use 'trained' or 'masked'"),
        ("midstream.policies.ladder.max_log_ratio=0", "max_log_ratio: got 0; use a value above 0"),
        (
            "midstream.policies.ladder.small_lag=-1",
            "midstream.policies.ladder.small_lag: got -1; use 0 or more",
        ),
        ("midstream.bounds.beyond=wait", "midstream.bounds.beyond: got 'wait'; use 'restart' or 'drop'"),
        ("~steps", "steps: got None; set it, there is no default"),
        ("steps=ten", "steps: got 'ten'; use a whole number"),
        ("steps=true", "steps: got True; use a whole number"),
        ("steps=0", "steps: got 0; use 1 or more"),
        ("trainer.lr='1e-4'", "trainer.lr: got '1e-4'; use a number (in YAML 1e-4 is text: write 1.0e-4)"),
        ("trainer.lr=nan", "trainer.lr: got nan; use a finite number"),
        ("tasks.difficulty=1.5", "tasks.difficulty: got 1.5; use 1.0 or less"),
        ("tasks.sources={easy: {share: 0}}", "tasks.sources.easy.share: got 0; use a value above 0"),
        ("tasks.sources={easy: {shar: 1}}", "no such key, did you mean tasks.sources.<name>.share?"),
        (
            "tasks.sources={easy: {share: 1, check: sumbit}}",
            "tasks.sources.easy.check: got 'sumbit'; use 'chain', 'submit' or 'never' (did you mean 'submit'?)",
        ),
        ("server.port=70000", "server.port: got 70000; use 65535 or less"),
        ("rollout.rollout_top_k=0", "rollout.rollout_top_k: got 0; use -1 for no limit, or 1 and more"),
        ("rollout.custom_rm_path=rm", "rollout.custom_rm_path: got 'rm'; write package.module.name"),
        (
            "midstream.environment.factory=a.B",
            "midstream.environment.factory: got 'a.B'; write package.module:Name",
        ),
        ("midstream.turns=3", "midstream.turns: got 3; use a mapping of settings"),
        ("run_dir=${nowhere}", "Interpolation key 'nowhere' not found"),
        ("steps", "override: got 'steps'; write key=value"),
        ("strategies=[wait", "override: got 'strategies=[wait'; write key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_fix(override, message):
    assert message in fault_of(override)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["strategy=wait", "rollout.over_sampling_batch_size=24"], "rollout.over_sampling_batch_size"),
        (["strategy=continue", "rollout.over_sampling_batch_size=15"], "rollout.over_sampling_batch_size"),
        (["strategy=wait", "rollout.partial_rollout=true"], "rollout.partial_rollout"),
        (["strategy=discard", "rollout.partial_rollout=true"], "rollout.partial_rollout"),
        (["strategy=continue", "rollout.partial_rollout=false"], "rollout.partial_rollout"),
        (["strategy=restart", "rollout.partial_rollout=false"], "rollout.partial_rollout"),
        (["strategy=naive", "rollout.partial_rollout=false"], "rollout.partial_rollout"),
        (["strategy=rewind", "rollout.partial_rollout=false"], "rollout.partial_rollout"),
        (["strategy=rewind", "midstream.bounds.environment=7"], "midstream.policies.rewind.max_lag"),
        (["strategy=anchor", "rollout.partial_rollout=false"], "rollout.partial_rollout"),
        (["strategy=ladder", "rollout.partial_rollout=false"], "rollout.partial_rollout"),
        (["strategy=ladder", "midstream.bounds.environment=7"], "midstream.policies.ladder.max_lag"),
        (["strategy=ladder", "midstream.policies.ladder.small_lag=9"], "midstream.policies.ladder.small_lag"),
        (["strategy=ladder", "rollout.rollout_temperature=0.7"], "rollout.rollout_temperature"),
        (["midstream.bounds.deadline_s=60.0"], "midstream.bounds.deadline_s"),
        (["tasks.path=tasks.jsonl", "tasks.held_out=8"], "tasks.held_out"),
        (["tasks.held_out_every=2"], "tasks.held_out_every"),
        (["tasks.path=tasks.jsonl", "tasks.sources={easy: {share: 1}}"], "tasks.sources"),
        (["job=mixed", "tasks.count=6"], "tasks.count"),
        (["job=mixed", "tasks.held_out=6"], "tasks.held_out"),
        (["midstream.curriculum.enabled=true"], "rollout.dynamic_sampling_filter_path"),
        (
            [
                "strategy=curriculum",
                "rollout.dynamic_sampling_filter_path=my.filter",
                "midstream.curriculum.early_stop.min_informative=0.1",
            ],
            "rollout.dynamic_sampling_filter_path",
        ),
        (["midstream.turns.max_tokens_per_turn=1000"], "midstream.turns.max_tokens_per_turn"),
        (["server.max_total_tokens=100"], "server.max_total_tokens"),
        (["trainer.num_minibatches=3"], "trainer.num_minibatches"),
        (["trainer.eps_clip_high=0.1"], "trainer.eps_clip_high"),
        (["model.num_query_groups=3"], "model.num_query_groups"),
        (["midstream.turns.observation_template=obs"], "midstream.turns.observation_template"),
        (
            ["midstream.turns.observation_template='{observation} {x}'"],
            "midstream.turns.observation_template",
        ),
        (["midstream.turns.observation_template='{observation} {'"], "midstream.turns.observation_template"),
        (["midstream.turns.action_pattern='(.*'"], "midstream.turns.action_pattern"),
        (["midstream.turns.action_pattern='.*'"], "midstream.turns.action_pattern"),
        (["midstream.turns.action_pattern='(a)(b)'"], "midstream.turns.action_pattern"),
        (
            ["midstream.environment.backend=overlay", "midstream.environment.isolation=none"],
            "midstream.environment.backend",
        ),
        (["midstream.environment.pool.lease_s=60.0"], "midstream.environment.pool.lease_s"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, key):
    assert re.match(rf"{re.escape(key)}: got .+; .+", fault_of(*overrides))


def test_what_the_chosen_policy_does_not_read_contradicts_nothing():
    compose(["strategy=continue", "midstream.bounds.environment=7"])
    compose(["strategy=rewind", "midstream.bounds.environment=null", "midstream.policies.rewind.max_lag=99"])
    compose(
        ["strategy=ladder", "rollout.rollout_temperature=0.7", "midstream.policies.ladder.max_log_ratio=null"]
    )
    compose(["strategy=anchor", "rollout.rollout_temperature=0.7"])
    own = ["midstream.resume_policy=my.policies:Mine", "+midstream.policies.custom={age: 3, names: [a]}"]
    for comes_back in ("true", "false"):
        config = compose([*own, f"rollout.partial_rollout={comes_back}"])
        assert config.midstream.policies.custom == {"age": 3, "names": ["a"]}


def test_a_contradiction_of_one_compared_strategy_is_found_before_anything_runs():
    compose(["rollout.over_sampling_batch_size=24"])
    with pytest.raises(ConfigError, match="resume_policy=wait cuts nothing off"):
        compose_runs(["rollout.over_sampling_batch_size=24"])


def test_every_fault_is_reported_at_once():
    assert len(fault_of("steps=0", "trainer.lr=-1", "sed=1").splitlines()) == 3


def test_a_hosts_own_hydra_is_left_as_it_was():
    GlobalHydra.instance().clear()
    compose([])
    assert not GlobalHydra.instance().is_initialized()


def test_the_resolved_file_says_everything_and_reads_back_the_same(tmp_path):
    config = compose(["job=quick", "trainer.lr=1e-7", "tasks.path=/data/tasks.jsonl"])
    write_resolved(config, tmp_path / "run" / "config.yaml")
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "${" not in text
    assert JobConfig.model_validate(OmegaConf.to_container(OmegaConf.create(text))) == config


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_resolved(compose(["seed=1"]), path)
    before = path.read_bytes()

    def disk_is_full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        write_resolved(compose(["seed=2"]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_every_run_of_a_comparison_has_a_folder_of_its_own():
    runs = compose_runs(["midstream.run_dir=/elsewhere", "run_dir=/r", "strategies=[wait,continue]"])
    assert [str(config.midstream.run_dir) for config in runs.values()] == ["/r/wait", "/r/continue"]


def test_what_only_some_strategies_cannot_live_with_is_told_with_their_names():
    credit = "midstream.credit.estimators=[anchored]"
    assert list(compose_runs(["strategies=[anchor]", credit])) == ["anchor"], (
        "the base is none that was asked for"
    )
    with pytest.raises(ConfigError) as caught:
        compose_runs(["strategies=[wait,anchor,continue]", credit])
    first, second = str(caught.value).splitlines()
    assert first.startswith("midstream.credit.estimators: got 'anchored'; set midstream.resume_policy=anchor")
    assert (first[-15:], second[-19:]) == ("(strategy wait)", "(strategy continue)")
    with pytest.raises(
        ConfigError, match=r"^trainer.lrr: got 3; there is no such key, did you mean trainer.lr\?$"
    ):
        compose_runs(["strategies=[wait,continue]", "trainer.lrr=3"])


def test_one_policy_for_several_strategies_is_refused():
    policy = "midstream.resume_policy=a.b:C"
    assert compose_runs(["strategies=[continue]", policy])["continue"].midstream.resume_policy == "a.b:C"
    with pytest.raises(
        ConfigError, match="got 'a.b:C'; each of wait, continue has its own: name one strategy"
    ):
        compose_runs(["strategies=[wait,continue]", policy])


def test_a_group_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"rollout.n_samples_per_prompt: got 1; use 2 or more"):
        compose(["rollout.n_samples_per_prompt=1"])
