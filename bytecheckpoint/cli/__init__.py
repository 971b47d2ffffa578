"""The ``bcp`` command: inspect, show, verify, compare, rewrite, export, import, average, copy, upload, remove, push."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click
from click.shell_completion import CompletionItem

from ..version import VERSION
from .options import EXIT_CODES

__all__ = ["cli", "main"]

# By purpose: the module of each command and its line of help. A command's module is imported when the command runs, so
# that a shell does not wait for torch where a command does not need it.
_COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Find": {
        "ls": ("listing", "List the checkpoints below a root."),
        "latest": ("listing", "Print the path of the newest, the best or a named checkpoint."),
    },
    "Look": {
        "inspect": ("inspection", "Show tensors, shards, files and values."),
        "show": ("show", "Show one tensor with statistics, or one plain value."),
        "verify": ("inspection", "Check every byte against its checksum."),
        "diff": ("maintenance", "Compare two checkpoints of any layouts."),
        "top": ("top", "Show the job that saves below a root, and its pace."),
        "report": ("report", "Write a page of a root's checkpoints, and of where the time went."),
        "trace": ("maintenance", "Merge the traces of all ranks into one file."),
    },
    "Convert": {
        "export": ("huggingface", "Write the model as a Hugging Face folder or another format."),
        "import": ("huggingface", "Create a checkpoint from one that another library wrote."),
        "reshard": ("maintenance", "Rewrite a checkpoint in different files."),
        "average": ("maintenance", "Average the tensors of several checkpoints."),
    },
    "Move and remove": {
        "copy": ("copying", "Copy a checkpoint, on the same store or to another."),
        "upload": ("copying", "Finish the uploads of checkpoints in a local directory."),
        "rollback": ("maintenance", "Make an older step the newest one."),
        "rm": ("maintenance", "Remove a checkpoint."),
        "clean": ("incomplete", "Remove what failed saves and uploads have left."),
    },
    "Deliver": {
        "push": ("push", "Push weights into running engines."),
    },
}
_HOMES = {name: module for commands in _COMMANDS.values() for name, (module, _) in commands.items()}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_HOMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _HOMES:
            return None
        module = importlib.import_module(f".{_HOMES[name]}", __name__)
        found: click.Command = getattr(module, f"{name}_command")
        return found

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [(name, text) for commands in _COMMANDS.values() for name, (_, text) in commands.items()]
        found = [CompletionItem(name, help=text) for name, text in commands if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, context, incomplete)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for purpose, commands in _COMMANDS.items():
            with formatter.section(purpose):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()], col_max=10)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, epilog=EXIT_CODES
)
@click.version_option(VERSION, prog_name="bcp")
def cli() -> None:
    """Inspect, verify, compare, convert, copy, remove and push checkpoints.

    A checkpoint is given as a path or a URL (s3://bucket/run/step-100). With --json, every command prints one JSON
    document, and nothing else, to standard output. Errors go to standard error.
    """


def main() -> None:
    """The entry point of the ``bcp`` script; exits with a code of ``options.EXIT_CODES``."""
    cli(prog_name="bcp")
