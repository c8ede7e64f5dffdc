"""Which environment a rollout acts in, the sandboxes below it, and where their states are kept."""

from typing import Literal, Self

from pydantic import Field, model_validator

from midstream.conf.errors import Problem, refuse
from midstream.conf.schema.base import Count, ObjectPath, PathSetting, Seconds, Section


class LimitsConfig(Section):
    """What one sandbox may use. A workspace beyond its limits ends the episode with reward 0."""

    workspace_bytes: Count = 4 << 30
    """Of the files' data on disk; holes do not count."""
    workspace_entries: Count = 200_000
    """Files, folders and links."""
    workspace_depth: Count = 512
    """Folders within folders."""
    processes: int = Field(default=512, ge=16)
    memory_bytes: int = Field(default=4 << 30, ge=64 << 20)
    """Of each process, and of the sandbox as a whole, /tmp included, where this user may make control groups."""
    file_bytes: Count = 1 << 30
    """Of one file that a command writes."""
    open_files: int = Field(default=1024, ge=128)
    """Of one process."""
    tmp_bytes: Count = 64 << 20
    """Of /tmp, and of /dev/shm; neither is kept by snapshots."""


class PoolConfig(Section):
    """How many sandboxes there are, how fast they are made, and what happens when that fails."""

    max_sandboxes: Count | None = None
    """Alive at once, over all processes that share `shared_path`; more wait for their turn. None: as many as
    this host's memory and descriptors allow."""
    creations_per_s: float | None = Field(default=None, gt=0)
    """Over all processes that share `shared_path`. None: no bound."""
    creations_in_flight: Count = 64
    """Of one process."""
    warm: int = Field(default=0, ge=0)
    """Spare sandboxes that wait ready, for tasks that were started before."""
    hot: int = Field(default=64, ge=0)
    """Sandboxes of rollouts that were cut off which stay alive; the oldest beyond that are closed, and come
    back from their snapshots."""
    lease_s: Seconds = 3600.0
    """A sandbox that nobody used for that long is taken away."""
    acquire_timeout_s: Seconds = 600.0
    """How long a rollout waits for a sandbox before that is a failure."""
    shared_path: PathSetting | None = None
    """A folder in which processes and hosts share the limits; None: each process has its own."""


class EnvironmentConfig(Section):
    """Which environment a rollout acts in, and the limits on what is run there."""

    factory: ObjectPath = "midstream.envs.workspace:WorkspaceFactory"
    """The class that starts and resumes environments."""
    backend: Literal["auto", "overlay", "store"] = "auto"
    """How workspaces are kept and forked. overlay: by stacked mounts, at no cost that grows with the files;
    store: as plain folders, anywhere; auto: overlay where it works."""
    isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    """How commands are kept from the host. auto: bubblewrap, or an error where that cannot work; none: not at
    all, commands of the model run with the job's rights."""
    network: bool = False
    """Whether commands reach the host's network."""
    step_timeout_s: Seconds = 30.0
    """Longer commands are ended, and the agent is told so."""
    eval_timeout_s: Seconds = 60.0
    """For a task's preparation and its check; a check that takes longer gives 0."""
    max_output_bytes: Count = 65536
    """Longer output of a command is cut."""
    done_command: str = Field(default="done", min_length=1)
    """The action that ends an episode."""
    sandbox_root: PathSetting | None = None
    """Folder for the sandboxes' files; None: a fresh temporary one per process."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    pool: PoolConfig = Field(default_factory=PoolConfig)

    @model_validator(mode="after")
    def _backend_is_possible(self) -> Self:
        if self.backend == "overlay" and self.isolation == "none":
            fix = "use store or auto: overlays are mounted in the sandbox's own namespaces"
            refuse([Problem("backend", self.backend, f"isolation=none has none; {fix}")])
        longest_s = max(self.step_timeout_s, self.eval_timeout_s)
        if self.pool.lease_s <= longest_s:
            refuse(
                [
                    Problem(
                        "pool.lease_s",
                        self.pool.lease_s,
                        f"use more than {longest_s:g}: a sandbox would be taken away from under a command",
                    )
                ]
            )
        return self


class SnapshotConfig(Section):
    """Where environments' states are kept, and for how long."""

    path: PathSetting | None = None
    """None: the folder `snapshots` of the run directory."""
    fsync: Literal["pinned", "always", "never"] = "pinned"
    """Which snapshots outlive a power cut: those that a rollout which was cut off rests on, all, or none.
    All of them outlive the death of any process."""
    keep: Literal["unfinished", "all"] = "unfinished"
    """unfinished: a rollout's snapshots go when it has ended or nobody will resume it."""
