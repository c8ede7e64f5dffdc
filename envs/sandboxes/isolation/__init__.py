"""How a sandbox's shell is kept from the host: inside bubblewrap's namespaces, or not at all."""

from midstream.envs.sandboxes.isolation.base import PATH, Isolation, IsolationUnavailable, Launch
from midstream.envs.sandboxes.isolation.choose import choose_isolation
from midstream.envs.sandboxes.isolation.limits import ProcessLimits

__all__ = ["PATH", "Isolation", "IsolationUnavailable", "Launch", "ProcessLimits", "choose_isolation"]
