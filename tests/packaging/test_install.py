"""A wheel and an editable install both give the package, whole, under its own name.

Both are made from a copy of the sources and put in fresh places, offline and without dependencies, which
come from the environment that runs the tests.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

LAYERS = ("cli", "local", "hooks", "buffers", "envs", "conf")
SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def run(*command: str | Path, cwd: Path, pythonpath: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": pythonpath, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(repository, tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(repository / name, copy)
    for layer in LAYERS:
        shutil.copytree(repository / layer, copy / layer, ignore=SKIPPED)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, sources, cwd=folder)
    (built,) = folder.glob("midstream-*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked_wheel(wheel, tmp_path_factory) -> Path:
    """A folder to put on the path, with the wheel's content as an installer lays it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def editable(sources, tmp_path_factory) -> Path:
    """The Python of an environment into which the sources are installed with `pip install -e`."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(site, "tests_environment.pth").write_text(sysconfig.get_path("purelib"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--ignore-installed")
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    run(*pip, *offline, "--editable", sources, cwd=folder)
    return python


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A job's own folder, whose packages are called like some of our layers."""
    for name in ("envs", "hooks", "conf"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("OWNER = 'the job'\n")
    return tmp_path


SEEN_FROM_ELSEWHERE = """
import importlib, sys
import conf, envs, hooks
assert {conf.OWNER, envs.OWNER, hooks.OWNER} == {"the job"}
for layer in ("conf", "envs", "buffers", "hooks", "hooks.slime"):
    print(importlib.import_module("midstream." + layer).__file__)
from midstream.conf.compose import compose
assert compose(["job=smoke"]).strategies == ["wait", "continue"]
"""


def test_the_wheel_works_from_another_folder_beside_packages_of_the_same_names(unpacked_wheel, elsewhere):
    path = f"{unpacked_wheel}{os.pathsep}{elsewhere}"
    seen = run(sys.executable, "-c", SEEN_FROM_ELSEWHERE, cwd=elsewhere, pythonpath=path).split()
    assert all(Path(file).is_relative_to(unpacked_wheel / "midstream") for file in seen)


def test_the_editable_install_works_from_another_folder_beside_packages_of_the_same_names(
    editable, sources, elsewhere
):
    seen = run(editable, "-c", SEEN_FROM_ELSEWHERE, cwd=elsewhere).split()
    assert all(Path(file).is_relative_to(sources) for file in seen)


def test_everything_in_the_layers_is_in_the_wheel_and_nothing_else(sources, wheel):
    ours = {
        f"midstream/{file.relative_to(sources)}"
        for layer in LAYERS
        for file in (sources / layer).rglob("*")
        if file.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == ours


def test_every_top_level_folder_with_code_is_a_layer_or_known_not_to_be_one(repository):
    tracked = run("git", "ls-files", "*.py", cwd=repository).split()
    folders = {Path(file).parts[0] for file in tracked if "/" in file}
    assert folders - {"tests", "benchmarks", "examples", "docs", "requirements"} <= set(LAYERS)


def test_the_console_command_is_installed_and_starts(editable, elsewhere):
    assert "compare" in run(editable.with_name("midstream"), "--help", cwd=elsewhere)
