"""Options, error messages and exit codes that all commands share."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..checkpoint.location import Location
from ..errors import (
    BytecheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    MismatchError,
    NameNotFoundError,
    NotACheckpointError,
    StateError,
    StorageError,
    UsageError,
)
from ..runtime.arguments import ARGUMENTS
from .output import Output, printable

EXIT_CODES = """\b
Exit codes:
  0  success
  1  negative result: verify found damage, diff found differences, an export lacks expected names, the sources of an
     average do not fit, or rm or clean was declined
  2  invalid usage
  3  nothing is stored at the path, or it is not a checkpoint
  4  the checkpoint is damaged, or this version cannot read its format
  5  a storage operation failed or was denied, or the target already exists
  6  any other error
  130  interrupted
  141  the reader of the output ended first
"""

EXIT_NEGATIVE = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 4
EXIT_OTHER = 6
EXIT_INTERRUPTED = 130
EXIT_NOT_READ = 141  # as of a process that SIGPIPE ends
_SIZE_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)},
}

Run: TypeAlias = Callable[..., None]

Locate: TypeAlias = Callable[[str], Location]
"""Returns the location of one of a command's URLs, with the storage options of the command; local paths have none."""


def command(
    name: str,
    *,
    uses_storage: bool = True,
    finds_urls: bool = False,
    needs: Mapping[str, str] = MappingProxyType({}),
    excludes: Mapping[str, Sequence[str]] = MappingProxyType({}),
    interrupted: str = "incomplete output was removed",
) -> Callable[[Run], click.Command]:
    """Decorate a function of an ``Output``, a ``Locate`` and its own parameters as a command.

    A command that ``finds_urls`` by itself accepts storage options without one. A command of local files only
    (``uses_storage=False``) has no ``--storage-option``; its function gets no ``Locate``. ``needs`` and ``excludes``
    are options that would have no effect without another one, or together with others: to give them there is an error.
    ``interrupted`` is printed after Ctrl-C.
    """

    def decorate(function: Run) -> click.Command:
        @functools.wraps(function)
        def run(*, as_json: bool, debug: bool, storage_option: tuple[str, ...] = (), **arguments: Any) -> None:
            with _failures(interrupted, debug=debug):
                _refuse_empty(arguments)
                _refuse_without_effect(needs, excludes)
                if storage_option and not finds_urls and not any(map(_is_remote, _texts(arguments.values()))):
                    raise click.UsageError(
                        "--storage-option applies to URLs such as s3://bucket/run, and none is given"
                    )
                out = Output(as_json=as_json)
                if uses_storage:
                    function(out, functools.partial(_locate, _storage_options(storage_option)), **arguments)
                else:
                    function(out, **arguments)

        run = click.option("--debug", is_flag=True, help="Print the traceback of an error.")(run)
        if uses_storage:
            run = click.option(
                "-o",
                "--storage-option",
                multiple=True,
                metavar="KEY=VALUE",
                help="Option for storage backends of URLs (endpoint_url=https://...); VALUE may be JSON. Repeatable.",
            )(run)
        run = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(run)
        made = click.command(name, epilog=EXIT_CODES)(run)
        names = {option for parameter in made.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert names.issuperset([*needs, *needs.values(), *excludes, *chain.from_iterable(excludes.values())])
        for parameter in made.params:
            if isinstance(parameter, click.Argument) and parameter.type is click.STRING:
                parameter.type = _PathOrURL()
        return made

    return decorate


class _PathOrURL(click.types.StringParamType):
    """A text for which a shell completes paths."""

    def shell_complete(
        self, context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error, the same for all commands."""
    codes: list[tuple[type[BaseException], int]] = [
        (MismatchError, EXIT_NEGATIVE),
        (StateError, EXIT_OTHER),
        (UsageError, EXIT_USAGE),
        (NameNotFoundError, EXIT_USAGE),
        (CheckpointNotFoundError, 3),
        (NotACheckpointError, 3),
        (CheckpointError, EXIT_CORRUPT),
        (StorageError, 5),
    ]
    return next((code for kind, code in codes if isinstance(error, kind)), EXIT_OTHER)


@contextmanager
def _failures(interrupted: str, *, debug: bool) -> Iterator[None]:
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except BrokenPipeError:
        # The reader of the output is gone. Without this, Python would try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(EXIT_NOT_READ) from None
    except KeyboardInterrupt:
        click.echo(f"bcp: interrupted; {interrupted}", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 - it becomes a message and an exit code
        if debug:
            click.echo(printable(traceback.format_exc()), err=True)
        if isinstance(error, BytecheckpointError):
            click.echo(f"bcp: {printable(error)}", err=True)
        else:
            hint = "" if debug else "; --debug prints the traceback"
            click.echo(f"bcp: unexpected {type(error).__name__}: {printable(error)}{hint}", err=True)
        raise click.exceptions.Exit(exit_code(error)) from None


def _storage_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--storage-option must be KEY=VALUE, not {pair!r}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _locate(options: Mapping[str, Any], url: str) -> Location:
    return Location(url, storage_options=options if _is_remote(url) else {})


def _refuse_empty(arguments: Mapping[str, object]) -> None:
    for parameter in click.get_current_context().command.params:
        if "" in _texts([arguments.get(parameter.name or "")]):
            raise click.BadParameter("it is empty", param=parameter)


def _refuse_without_effect(needs: Mapping[str, str], excludes: Mapping[str, Sequence[str]]) -> None:
    context = click.get_current_context()
    given = {
        option
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        for option in (parameter.secondary_opts if context.params[parameter.name or ""] is False else parameter.opts)
    }
    for option, needed in needs.items():
        if option in given and needed not in given:
            raise click.UsageError(f"{option} applies only with {needed}", context)
    for option, others in excludes.items():
        for other in others:
            if {option, other} <= given:
                raise click.UsageError(f"{option} does not apply with {other}", context)


def _is_remote(url: str) -> bool:
    scheme = url.partition("://")[0].lower() if "://" in url or "::" in url else ""
    return scheme not in ("", "file", "local", "memory")


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


def parse_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse ``5GB``, ``512MiB`` or a plain number of bytes; None if the option was not given."""
    if value is None:
        return None
    text = value.strip().upper().removesuffix("B")
    number = text.rstrip("KMGTI")
    try:
        size = int(float(number) * _SIZE_UNITS[text[len(number) :].strip()])
    except (KeyError, ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is not a size; use for example 5GB, 512MiB or a number of bytes") from None
    if size < 1:
        raise click.BadParameter(f"{value!r} is less than one byte")
    return size


def not_negative(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Accept a finite number of at least 0, or None."""
    if value is not None and not 0 <= value < math.inf:
        raise click.BadParameter(f"it must be a finite number of at least 0, not {value:g}")
    return value


def checked(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Apply the rule that the library has for the argument of this name (``runtime.arguments``)."""
    try:
        return ARGUMENTS[parameter.name or ""](parameter.opts[0], value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def _renaming(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> Mapping[str, str] | None:
    """Return the ``OLD=NEW`` pairs as a mapping; None without any."""
    found: dict[str, str] = {}
    for text in pairs:
        old, equals, new = text.partition("=")
        if not equals or found.setdefault(old, new) != new:
            raise click.BadParameter(f"it must be OLD=NEW, with one NEW for each OLD, not {text!r}")
    return checked(context, parameter, found) if found else None


rename_option = click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    callback=_renaming,
    help="Replace a full name, or with dots at both ends the beginning of names: ema.module.=model. exports averaged "
    "weights as the model. Repeatable; the longest one that matches is used.",
)
"""The parameter ``rename`` of a command: a mapping, or None."""
