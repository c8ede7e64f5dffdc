"""From the layer's config to the settings of the parts below."""

from pathlib import Path

from midstream.conf.schema import LayerConfig, LimitsConfig, PoolConfig
from midstream.envs.pool.settings import PoolSettings
from midstream.envs.sandboxes.isolation import ProcessLimits
from midstream.envs.store.scan import TreeLimits


def pool_settings(config: PoolConfig, sandbox_root: Path) -> PoolSettings:
    """The pool's own settings, whose names the config shares."""
    return PoolSettings(**config.model_dump(), sandbox_root=sandbox_root)


def process_limits(config: LimitsConfig) -> ProcessLimits:
    """What holds for a sandbox's processes."""
    return ProcessLimits(
        **{name: value for name, value in config.model_dump().items() if not name.startswith("workspace_")}
    )


def tree_limits(config: LimitsConfig) -> TreeLimits:
    """What holds for a workspace's files."""
    return TreeLimits(config.workspace_entries, config.workspace_bytes, config.workspace_depth)


def snapshot_path(config: LayerConfig) -> Path | None:
    """Where snapshots lie; None where neither they nor the run have a folder."""
    if config.snapshots.path is not None:
        return config.snapshots.path
    return None if config.run_dir is None else config.run_dir / "snapshots"
