"""Values that cannot work are named; what is left open is derived from the machine."""

import resource

import pytest

from midstream.envs.pool import settings as settings_module
from midstream.envs.pool.settings import PoolSettings, derived_max_sandboxes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sandboxes", 0),
        ("creations_in_flight", 0),
        ("creations_per_s", 0.0),
        ("warm", -1),
        ("hot_bytes", -1),
        ("lease_s", 0.0),
        ("retry_attempts", 0),
        ("breaker_failed_share", 0.0),
        ("breaker_failed_share", 1.5),
        ("breaker_longest_s", 1.0),
        ("acquire_timeout_s", float("nan")),
    ],
)
def test_a_value_that_cannot_work_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got {value}"):
        PoolSettings(**{name: value})  # type: ignore[arg-type]


def test_few_descriptors_or_little_memory_mean_few_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PoolSettings(max_sandboxes=7).most_sandboxes() == 7
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 22, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert PoolSettings().most_sandboxes() == (1024 - 256) // 8
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 14, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert derived_max_sandboxes() == 4
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert derived_max_sandboxes() == 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1 << 30, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert derived_max_sandboxes() == settings_module.MOST_SANDBOXES
