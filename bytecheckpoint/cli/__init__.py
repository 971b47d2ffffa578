"""The ``bcp`` command: inspect, verify, compare, rewrite, export, import, average, copy, upload, remove, push."""

from __future__ import annotations

import click

from ..version import VERSION
from .copying import copy_command, upload_command
from .huggingface import export_command, import_command
from .inspection import inspect_command, latest_command, ls_command, verify_command
from .maintenance import average_command, diff_command, reshard_command, rm_command, rollback_command, trace_command
from .options import EXIT_CODES
from .push import push_command

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="bcp")
def cli() -> None:
    """Inspect, verify, compare, rewrite, export, import, average, copy, upload, remove and push checkpoints.

    A checkpoint is given as a path or a URL (s3://bucket/run/step-100). With --json, every command prints one JSON
    document, and nothing else, to standard output. Errors go to standard error.
    """


for _command in (
    ls_command,
    latest_command,
    inspect_command,
    verify_command,
    diff_command,
    reshard_command,
    export_command,
    import_command,
    average_command,
    copy_command,
    upload_command,
    rm_command,
    rollback_command,
    trace_command,
    push_command,
):
    cli.add_command(_command)


def main() -> None:
    """The entry point of the ``bcp`` script; exits with a code of ``options.EXIT_CODES``."""
    cli(prog_name="bcp")
