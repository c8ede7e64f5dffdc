"""What every verb of the command shares: exit codes and the options that change how errors are shown."""

from dataclasses import dataclass

import click

FINE, FAILED, WRONG_USAGE, DEGRADED, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass
class Settings:
    """Of one call of the command."""

    arguments: tuple[str, ...] = ()
    debug: bool = False


def _remember_debug(context: click.Context, _: click.Parameter, debug: bool) -> None:
    context.ensure_object(Settings).debug = debug


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    help="Show the traceback of an error.",
    callback=_remember_debug,
)
