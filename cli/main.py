"""The `midstream` command and its exit codes: 0 fine, 1 failed, 2 wrong usage, 3 degraded, 130 Ctrl-C."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from midstream.cli.blame import blame
from midstream.cli.compare import compare
from midstream.cli.report import report
from midstream.cli.sandbox import sandbox
from midstream.cli.settings import FAILED, INTERRUPTED, WRONG_USAGE, Settings
from midstream.cli.status import status
from midstream.cli.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="midstream", message="%(prog)s %(version)s")
def midstream() -> None:
    """Keep environments, records and credit right when the policy changes in the middle of a rollout.

    Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 degraded (it ran, but not as it should have),
    130 stopped by Ctrl-C.
    """


midstream.add_command(blame)
midstream.add_command(compare)
midstream.add_command(report)
midstream.add_command(sandbox)
midstream.add_command(status)
midstream.add_command(tune)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (those of the process where None) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    settings = Settings(arguments=tuple(arguments))
    # A job that is told to end, by `timeout` or a scheduler, cleans up as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = midstream.main(arguments, prog_name="midstream", standalone_mode=False, obj=settings)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("midstream: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has closed it; the flush at exit must not complain of it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001  the one place that turns any error into a message and a code
        return _failure(error, settings)
    return code if isinstance(code, int) else 0


def _failure(error: Exception, settings: Settings) -> int:
    if settings.debug:
        traceback.print_exception(error)
    else:
        click.echo(f"midstream: {_message(error)}", err=True)
        if not _is_expected(error):
            click.echo("midstream: pass --debug to see where this came from", err=True)
    return WRONG_USAGE if _is_wrong_usage(error) else FAILED


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_with(error.name)):
        return f"this needs {error.name}, which is not installed: {extra}"
    text = str(error).strip() or "no further message"
    return text if _is_expected(error) else f"{type(error).__name__}: {text}"


def _is_expected(error: Exception) -> bool:
    """Whether the error was written for whoever runs the command: the system's own, or one of midstream's."""
    if isinstance(error, ModuleNotFoundError):
        return bool(_extra_with(error.name))
    return isinstance(error, OSError) or type(error).__module__.startswith("midstream.")


def _extra_with(module: str | None) -> str:
    """How a module is installed that does not come with midstream itself; "" for any other."""
    package = (module or "").partition(".")[0]
    if package in {"jinja2", "matplotlib"}:
        return "pip install 'midstream[report]'"
    if package in {"numpy", "safetensors", "torch", "transformers"}:
        return "pip install 'midstream[local]', or `make setup` in a clone"
    return "`make setup` in a clone installs it" if package in {"megatron", "sglang"} else ""


def _is_wrong_usage(error: Exception) -> bool:
    return type(error).__name__ in {"ConfigError", "TasksError"} and _is_expected(error)


if __name__ == "__main__":
    sys.exit(main())
