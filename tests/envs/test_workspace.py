"""A workspace as the layers above use it: start, step, snapshot, resume, score, close."""

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from midstream.conf.schema import LayerConfig
from midstream.envs.errors import (
    EnvironmentFailure,
    RestoreMismatch,
    SnapshotDamaged,
    SnapshotMissing,
    WorkspaceLimit,
)
from midstream.envs.protocol import Snapshot, Task, load_factory
from midstream.envs.tasks import TasksError
from midstream.envs.workspace import WorkspaceFactory
from tests.envs.started import started_here

STARTUP = 'function done { echo said > said; echo bye; }\npeek() { read -r line < "$1"; echo "$line"; }\n'
TASK = Task(
    "fix f1",
    None,
    {
        "files": {"work/.bashrc": STARTUP, "work/f1": "bad\n", "notes/n": "n"},
        "pre_commands": ["echo prepared > log"],
        "eval_cmd": '[ "$(cat f1)" = ok ] && [ -f said ] && ! type peek',
        "workdir": "work",
    },
)


@pytest.fixture
def config(tmp_path):
    """Makes the layer's config with these settings of the environment."""

    def make(**environment) -> LayerConfig:
        environment = {"isolation": "none", "sandbox_root": tmp_path / "sandboxes", **environment}
        return LayerConfig(run_dir=tmp_path / "run", environment=environment)

    return make


@pytest.fixture
def factory(config, isolation, loop):
    factory = load_factory(config(isolation=isolation.name, step_timeout_s=0.5))
    assert isinstance(factory, WorkspaceFactory)
    yield factory
    assert factory.metrics()["sandbox/in_use"] == 0
    loop.run(factory.close())
    assert left_in(factory) == []
    assert started_here() == []


@pytest.fixture
def plain(config, loop):
    """A factory without isolation, for what does not depend on it."""
    factory = load_factory(config())
    yield factory
    loop.run(factory.close())


def left_in(factory) -> list[Path]:
    """What lies in the folder of all sandboxes, but for empty places of claims and layers."""
    return [path for path in Path(factory.settings.sandbox_root).rglob("*") if not path.is_dir()] + [
        path
        for path in Path(factory.settings.sandbox_root).iterdir()
        if not path.name.startswith((".claims", "layers"))
    ]


def test_an_episode_from_start_to_score(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        assert (await environment.reset(TASK)).text == ""
        assert (await environment.step("cat log; peek f1")).observation == "prepared\nbad"
        assert await environment.score() == 0.0
        step = await environment.step("echo ok > f1")
        assert (step.observation, step.done, step.reward) == ("", False, None)
        assert (await environment.step("false")).observation == "[exit 1]"
        step = await environment.step(" done\n")
        assert (step.observation, step.done) == ("bye", True)
        assert await environment.score() == 1.0
        await environment.close()
        await environment.close()

    loop.run(episode())
    assert (factory.counters.starts, factory.counters.failures) == (1, 0)


def test_a_fork_goes_on_from_the_snapshot_and_not_from_each_other(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        first = await environment.snapshot()
        assert (first.parent, first.changes) == (None, ())
        await environment.step("export MODE=fast; cd ../notes; echo more >> n; ln -s /etc here")
        second = await environment.snapshot()
        assert second.parent == first.id
        assert [(change.path, change.kind, change.bytes) for change in second.changes] == [
            ("notes/here", "created", 0),
            ("notes/n", "modified", 6),
        ]
        assert await environment.snapshot() is second
        forks = await asyncio.gather(*(factory.resume(TASK, second) for _ in range(3)))
        for number, fork in enumerate(forks):
            assert await fork.snapshot() is second
            step = await fork.step(f"echo $MODE ${{PWD##*/}}; cat n; peek ../work/f1; echo {number} > n")
            assert step.observation == "fast notes\nnmore\nbad"
        ends = [await fork.snapshot() for fork in forks]
        assert len({end.digest for end in ends}) == 3
        assert await environment.snapshot() is second
        again = await factory.resume(TASK, Snapshot.from_json(first.to_json()))
        assert (await again.step("echo ${MODE-unset} ${PWD##*/}; ls ../notes")).observation == "unset work\nn"
        for opened in (environment, again, *forks):
            await opened.close()

    loop.run(episode())
    counters = factory.counters
    assert (counters.resumes, counters.restores_checked, counters.restores_bad) == (4, 4, 0)


def test_equal_states_reached_by_different_ways_have_equal_digests(factory, loop):
    async def state_after(*actions: str) -> str:
        environment = await factory.start(TASK)
        for action in actions:
            await environment.step(action)
        snapshot = await environment.snapshot()
        await environment.close()
        return snapshot.digest

    async def both() -> None:
        direct = await state_after("echo ok > f1")
        assert direct == await state_after("rm f1", "touch x; echo wrong > f1", "rm x; echo ok > f1")
        assert direct != await state_after("echo ok > f1; chmod +x f1")

    loop.run(both())


def test_what_the_agent_does_wrong_is_observed_and_not_raised(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        step = await environment.step("echo begun; sleep 1000")
        assert step.observation == "begun\n[timed out after 0.5 s; a new shell was started]"
        assert step.info["timed_out"]
        assert (await environment.step("exit 3")).observation == "[exit 3]"
        assert (await environment.step("peek f1")).observation == "bad"
        await environment.step("rm -rf ../* ~/.* 2>/dev/null; cd ..")
        assert (await environment.step("exit; echo")).observation == ""
        assert (await environment.step("pwd >/dev/null && echo on")).observation == "on"
        assert await environment.score() == 0.0
        await environment.close()

    loop.run(episode())
    assert factory.counters.failures == 0


def test_a_cancelled_step_leaves_an_environment_that_can_only_be_closed(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        before = await environment.snapshot()
        step = asyncio.create_task(environment.step("echo half > f1; sleep 1000"))
        await asyncio.sleep(0.2)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        for use in (environment.step("true"), environment.snapshot(), environment.score()):
            with pytest.raises(EnvironmentFailure, match="go on from its last snapshot"):
                await use
        await environment.close()
        resumed = await factory.resume(TASK, before)
        assert (await resumed.step("peek f1")).observation == "bad"
        await resumed.close()

    loop.run(episode())


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_a_cancelled_start_or_resume_leaves_nothing(factory, loop, delay_s):
    async def cancelled() -> None:
        environment = await factory.start(TASK)
        snapshot = await environment.snapshot()
        await environment.close()
        opening = [
            asyncio.create_task(factory.start(TASK)),
            asyncio.create_task(factory.resume(TASK, snapshot)),
        ]
        await asyncio.sleep(delay_s)
        for task in opening:
            task.cancel()
        for opened in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(opened, BaseException):
                await opened.close()

    loop.run(cancelled())


def test_background_processes_do_not_tear_a_snapshot(config, bubblewrap, loop):
    factory = load_factory(config(isolation=bubblewrap.name))

    async def episode() -> None:
        environment = await factory.start(TASK)
        # A log that never holds still, so that only stopping its writer lets it be read.
        await environment.step("(while :; do echo $((++i)) >> log; done) & sleep 0.05")
        for _ in range(5):
            snapshot = await environment.snapshot()
            resumed = await factory.resume(TASK, snapshot)
            await resumed.close()
        before = (await environment.step("wc -l < log")).observation
        await asyncio.sleep(0.05)
        assert int((await environment.step("wc -l < log")).observation) > int(before)
        await environment.close()

        await factory.close()

    loop.run(episode())
    assert factory.counters.restores_bad == 0


def test_a_damaged_content_is_named_and_not_restored(plain, loop):
    async def episode() -> None:
        environment = await plain.start(TASK)
        snapshot = await environment.snapshot()
        await environment.close()
        (pack,) = (plain.backend.store.path / "packs").iterdir()
        content = bytearray(pack.read_bytes())
        content[-3] ^= 1
        pack.write_bytes(content)
        with pytest.raises(SnapshotDamaged, match=pack.stem):
            await plain.resume(TASK, snapshot)
        with pytest.raises(SnapshotMissing):
            await plain.resume(TASK, Snapshot("none", "none"))

    loop.run(episode())
    assert (plain.counters.failures, plain.metrics()["sandbox/in_use"]) == (2, 0)


def test_a_state_that_is_not_that_of_its_snapshot_is_refused_and_counted(plain, loop):
    async def episode() -> None:
        environment = await plain.start(TASK)
        snapshot = await environment.snapshot()
        await environment.close()
        with pytest.raises(RestoreMismatch, match=f"snapshot {snapshot.id} has digest"):
            await plain.resume(TASK, dataclasses.replace(snapshot, digest="0" * 64))

    loop.run(episode())
    counters = plain.counters
    assert (counters.restores_checked, counters.restores_bad, counters.failures) == (1, 1, 1)


def test_a_task_that_cannot_be_set_up_is_named_and_leaves_nothing(plain, loop):
    broken = Task("p", None, {"pre_commands": ["echo why >&2; exit 3"], "eval_cmd": "true"})
    with pytest.raises(EnvironmentFailure, match=r"pre_command 'echo why >&2; exit 3' exited with 3: why"):
        loop.run(plain.start(broken))
    with pytest.raises(TasksError, match="leaves the sandbox"):
        loop.run(plain.start(Task("p", None, {"files": {"../x": ""}, "eval_cmd": "true"})))
    assert plain.metrics()["sandbox/slots"] == 0


def test_a_rollout_that_rests_finds_its_environment_again_with_what_ran_in_it(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        await environment.step("counter=7; cd ../notes; echo more >> n")
        snapshot = await environment.snapshot()
        await environment.rest()
        with pytest.raises(EnvironmentFailure, match="is closed"):
            await environment.step("true")
        again = await factory.resume(TASK, snapshot)
        # A variable that was not exported shows that it is the same shell.
        assert (await again.step("echo $counter ${PWD##*/}; cat n")).observation == "7 notes\nnmore"
        await again.close()
        cold = await factory.resume(TASK, snapshot)
        assert (await cold.step("echo ${counter-none} ${PWD##*/}; cat n")).observation == "none notes\nnmore"
        await cold.close()

    loop.run(episode())
    assert factory.metrics()["sandbox/hot_hits"] == 1


def test_an_environment_that_went_on_after_its_snapshot_is_not_found_again(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        snapshot = await environment.snapshot()
        await environment.step("echo later > f1")
        await environment.rest()
        again = await factory.resume(TASK, snapshot)
        assert (await again.step("peek f1")).observation == "bad"
        await again.close()

    loop.run(episode())
    assert factory.metrics()["sandbox/hot_hits"] == 0


def test_rollouts_that_do_the_same_neither_share_nor_take_each_others_snapshots(factory, loop):
    async def episode() -> None:
        environments = [await factory.start(TASK) for _ in range(2)]
        snapshots = []
        for name, environment in zip(("one", "two"), environments, strict=True):
            await environment.step(f"secret={name}; cd ../notes")
            snapshots.append(await environment.snapshot())
            await environment.rest()
        one, two = snapshots
        assert one.digest == two.digest and one.id != two.id
        again = await factory.resume(TASK, two)
        assert (await again.step("echo $secret")).observation == "two"
        await factory.forget([two])
        assert one.id in factory.backend.store.pins()[factory.retention.owner]
        other = await factory.resume(TASK, one)
        assert (await other.step("echo $secret")).observation == "one"
        await again.close()
        await other.close()

    loop.run(episode())


def test_a_rollout_cut_off_in_a_step_rests_on_the_snapshot_before_it(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        snapshot = await environment.snapshot()
        step = asyncio.create_task(environment.step("echo half > f1; sleep 1000"))
        await asyncio.sleep(0.2)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await environment.rest()
        assert factory.backend.store.pins()[factory.retention.owner] == {snapshot.id}
        assert factory.metrics()["sandbox/hot"] == 0

    loop.run(episode())


def test_a_task_that_is_itself_beyond_the_limits_is_no_fault_of_the_agent(config, isolation, loop):
    factory = load_factory(config(isolation=isolation.name, limits={"workspace_entries": 3}))

    async def episode() -> None:
        with pytest.raises(
            EnvironmentFailure, match=r"the task's own workspace is beyond the limits: .* room for it"
        ):
            await (await factory.start(TASK)).snapshot()
        await factory.close()

    loop.run(episode())
    assert factory.counters.faults == 0


def test_what_nobody_will_resume_is_forgotten(factory, loop):
    async def episode() -> None:
        environment = await factory.start(TASK)
        await environment.step("echo ok > f1")
        snapshot = await environment.snapshot()
        await environment.rest()
        assert snapshot.id in factory.backend.store.pins()[factory.retention.owner]
        await factory.forget([snapshot])
        assert factory.metrics()["sandbox/in_use"] == factory.metrics()["sandbox/hot"] == 0
        with pytest.raises(SnapshotMissing):
            await factory.resume(TASK, snapshot)

    loop.run(episode())


@pytest.mark.parametrize("make", ["seq 300 | xargs touch", "mkdir -p $(seq -s / 40)"])
def test_a_workspace_beyond_its_limits_is_the_agents_fault(config, isolation, loop, make):
    limits = {"workspace_entries": 200, "workspace_depth": 32}
    factory = load_factory(config(isolation=isolation.name, limits=limits))

    async def episode() -> None:
        environment = await factory.start(TASK)
        await environment.step(make)
        with pytest.raises(WorkspaceLimit):
            await environment.snapshot()
        await environment.close()
        await factory.close()

    loop.run(episode())
    assert (factory.counters.faults, factory.counters.failures) == (1, 0)
    assert left_in(factory) == []


def test_reset_goes_back_to_the_beginning(plain, loop):
    async def episode() -> None:
        environment = await plain.start(TASK)
        await environment.step("echo ok > f1; cd /; extra=1")
        await environment.snapshot()
        await environment.reset(TASK)
        assert (await environment.step("peek f1; echo ${extra-unset}")).observation == "bad\nunset"
        assert (await environment.snapshot()).parent is None
        await environment.close()

    loop.run(episode())


def test_done_ends_the_episode_where_the_shell_does_not_know_it(config, loop):
    factory = load_factory(config(done_command="submit"))

    async def episode() -> None:
        environment = await factory.start(TASK)
        step = await environment.step("submit")
        assert (step.observation, step.done, step.info["exit_code"]) == ("", True, 0)
        await environment.close()
        await factory.close()

    loop.run(episode())


def test_two_hundred_workspaces_step_and_snapshot_side_by_side(config, bubblewrap, loop):
    factory = load_factory(config(isolation=bubblewrap.name))

    async def rollout(number: int) -> str:
        environment = await factory.start(TASK)
        for turn in range(3):
            await environment.step(f"echo {number}.{turn} > f1")
            snapshot = await environment.snapshot()
        observation = (await environment.step("peek f1")).observation
        await environment.close()
        assert snapshot.parent is not None
        return observation

    async def all_rollouts() -> list[str]:
        return await asyncio.gather(*map(rollout, range(200)))

    assert loop.run(all_rollouts()) == [f"{number}.2" for number in range(200)]
    assert (factory.metrics()["sandbox/in_use"], factory.counters.failures) == (0, 0)
    loop.run(factory.close())


def test_the_own_directory_of_a_factory_goes_with_it(config, loop):
    factory = load_factory(config(sandbox_root=None))
    root = factory.backend.root
    environment = loop.run(factory.start(TASK))
    assert root.is_dir()
    loop.run(environment.close())
    loop.run(factory.close())
    del factory, environment
    deadline = time.monotonic() + 5
    while root.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not root.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("midstream.envs.workspace", "is not of the form 'package.module:Class'"),
        ("midstream.envs.nowhere:Factory", "no module 'midstream.envs.nowhere'"),
        ("nowhere.at.all:Factory", "no module 'nowhere'"),
        ("midstream.envs.workspace:Nothing", "'midstream.envs.workspace' has no class 'Nothing'"),
    ],
)
def test_a_factory_that_cannot_be_loaded_is_named(config, name, message):
    settings = config()
    settings = settings.model_copy(
        update={"environment": settings.environment.model_copy(update={"factory": name})}
    )
    with pytest.raises(ValueError, match=f"environment.factory='{name}'") as raised:
        load_factory(settings)
    assert message in str(raised.value)
