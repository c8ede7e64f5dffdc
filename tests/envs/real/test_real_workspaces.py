"""An agent at work on real projects: every turn can be gone on from, here and on another backend, as it was."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.envs.protocol import Snapshot
from midstream.envs.sandboxes.backend import LocalBackend
from midstream.envs.sandboxes.protocol import Sandbox, SandboxSpec
from tests.envs.real.projects import PROJECTS, Project

COMMAND_TIMEOUT_S = 60.0
READ = "utf-8", "surrogateescape"


# From which backend to which, for each project; the way back is gone once.
WAYS = [(project, "overlay", "store") for project in PROJECTS] + [(PROJECTS[0], "store", "overlay")]


@pytest.mark.parametrize(("project", "here", "there"), WAYS, ids=lambda way: getattr(way, "name", way))
def test_every_turn_is_gone_on_from_with_the_same_state_and_the_same_test_results(
    project: Project,
    here: str,
    there: str,
    backends: dict[str, LocalBackend],
    loop: asyncio.Runner,
    tmp_path: Path,
):
    spec = SandboxSpec(files=dict(_texts(project.source())))
    first, other = backends[here], backends[there]

    snapshots, reports = loop.run(_worked(first, spec, project))

    assert len({snapshot.digest for snapshot in snapshots}) == len(snapshots)
    assert "FAILED" in reports[2] and "OK" in reports[-1]
    loop.run(_gone_on(first, first, spec, project, snapshots, reports, tmp_path))
    loop.run(_gone_on(first, other, spec, project, snapshots, reports, tmp_path))


async def _worked(
    backend: LocalBackend, spec: SandboxSpec, project: Project
) -> tuple[list[Snapshot], list[str]]:
    """A snapshot and the result of the project's tests after each turn."""
    sandbox = await backend.create(spec)
    snapshots, reports = [], []
    try:
        for command in project.turns():
            result = await sandbox.exec(command, COMMAND_TIMEOUT_S)
            assert result.exit_code == 0, result.output
            snapshots.append(await sandbox.snapshot())
            reports.append(await _tested(sandbox, project))
            # The run of the tests leaves its bytecode behind, which is not the turn's doing.
            await sandbox.restore(snapshots[-1])
        return snapshots, reports
    finally:
        await sandbox.destroy()


async def _gone_on(
    source: LocalBackend,
    backend: LocalBackend,
    spec: SandboxSpec,
    project: Project,
    snapshots: list[Snapshot],
    reports: list[str],
    scratch: Path,
) -> None:
    """Resumes and forks from every turn's snapshot, which reaches another backend as a file."""
    for number, (snapshot, report) in enumerate(zip(snapshots, reports, strict=True)):
        if backend is not source:
            bundle = scratch / f"{project.name}-{number}"
            await source.export_snapshot(snapshot, bundle)
            imported = await backend.import_snapshot(bundle)
            assert (imported.id, imported.digest) == (snapshot.id, snapshot.digest)
        forks = await backend.fork(spec, snapshot, 2)
        try:
            for fork in forks:
                assert not isinstance(fork, Exception), fork
                assert (await fork.snapshot()).digest == snapshot.digest
            state = await forks[0].exec("pwd; echo ${FIXED-no}", COMMAND_TIMEOUT_S)
            assert state.output.split() == (
                ["/workspace/tests", "yes"] if number == 4 else ["/workspace", "yes" if number > 4 else "no"]
            )
            assert await _tested(forks[1], project) == report
        finally:
            await asyncio.gather(*(fork.destroy() for fork in forks if not isinstance(fork, Exception)))


async def _tested(sandbox: Sandbox, project: Project) -> str:
    result = await sandbox.exec_fresh(project.test_command, COMMAND_TIMEOUT_S)
    return re.sub(r"in [\d.]+s", "", result.output)


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(root)), path.read_bytes().decode(*READ)
