"""Keeps stdout clean: what a library prints while a job runs must not end up in the output of `--json`."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Within it, whatever this process and its children write to stdout goes to stderr."""
    sys.stdout.flush()
    stdout, stderr = 1, 2
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, stdout)
        os.close(kept)
