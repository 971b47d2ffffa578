"""The ``bcp`` command: look at checkpoints, prove them, compare, rewrite, export, import, copy and remove them."""

from __future__ import annotations

import click

from ..version import VERSION
from .comparing import diff_command
from .exchange import export_command, import_command
from .looking import inspect_command, ls_command
from .moving import copy_command, rm_command
from .options import EXIT_CODES
from .push import push_command
from .reshard import reshard_command
from .tracing import trace_command
from .verify import verify_command

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="bcp")
def cli() -> None:
    """Look at checkpoints, prove them, compare, rewrite, export, import, copy and remove them.

    A checkpoint is named by a path or a URL (s3://bucket/run/step-100). Every command takes --json, for one JSON
    document on standard output and nothing else; whatever goes wrong is said on standard error.
    """


for _command in (
    ls_command,
    inspect_command,
    verify_command,
    diff_command,
    reshard_command,
    export_command,
    import_command,
    copy_command,
    rm_command,
    trace_command,
    push_command,
):
    cli.add_command(_command)


def main() -> None:
    """The entry point of the ``bcp`` script; exits with a code of ``options.EXIT_CODES``."""
    cli(prog_name="bcp")
