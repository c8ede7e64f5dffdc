"""Real Python projects from the package index, and an agent that works on them by script.

The source distributions are fetched once into `.cache/projects` of the checkout, by pip.
"""

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parents[3] / ".cache" / "projects"
FETCH_TIMEOUT_S = 180


@dataclass(frozen=True)
class Project:
    """A project, the command that runs part of its own tests, and a fault to plant: a sed command and its undoing."""

    name: str
    version: str
    test_command: str
    module: str
    fault: str
    mend: str

    def source(self) -> Path:
        """The unpacked source distribution. Raises CalledProcessError where it cannot be had."""
        folder = CACHE / f"{self.name}-{self.version}"
        if not folder.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
            subprocess.run(
                [*fetch, "--quiet", "--dest", str(CACHE), f"{self.name}=={self.version}"],
                check=True,
                capture_output=True,
                timeout=FETCH_TIMEOUT_S,
            )
            archive = next(CACHE.glob(f"{self.name.replace('-', '[-_]')}-{self.version}.tar.gz"))
            with tarfile.open(archive) as files:
                files.extractall(folder, filter="data")
        return next(path for path in folder.iterdir() if path.is_dir())

    def turns(self) -> list[str]:
        """What the agent does, one command a turn."""
        return [
            "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm start",
            f"sed -i '{self.fault}' {self.module} && git diff --stat",
            f"{self.test_command} > report.txt 2>&1; tail -n 1 report.txt",
            f"cp {self.module} before.bak && ln before.bak link.bak && ln -s before.bak soft.bak && mkdir empty",
            f"sed -i '{self.mend}' {self.module}; export FIXED=yes; cd tests",
            f"cd .. && {self.test_command} > report.txt 2>&1; tail -n 1 report.txt; rm -r empty before.bak",
        ]


PROJECTS = [
    Project(
        "idna",
        "3.20",
        "python3 -m unittest -q tests.test_intranges tests.test_idna_compat",
        "idna/intranges.py",
        "s/return tuple(ranges)/return ()/",
        "s/return ()/return tuple(ranges)/",
    ),
    Project(
        "markdown",
        "3.11.3",
        "python3 -m unittest -q tests.test_apis",
        "markdown/core.py",
        "s/if not source.strip():/if source.strip():/",
        "s/if source.strip():/if not source.strip():/",
    ),
    Project(
        "more-itertools",
        "11.2.1",
        "python3 -m unittest -q tests.test_recipes.TakeTests tests.test_recipes.TabulateTests",
        "more_itertools/recipes.py",
        "s/return list(islice(iterable, n))/return list(islice(iterable, n + 1))/",
        "s/islice(iterable, n + 1)/islice(iterable, n)/",
    ),
]
