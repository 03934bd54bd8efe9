"""The command line: registers every command, and turns errors into messages and exit codes.

The module from which a command is registered below has its options, its help and its work. No command loads torch
before it has checked what was typed, so that `--help`, `status` and a refusal come at once. Each `UserError` becomes
one message (what, why, what to try) on the standard error and its exit code.
"""

from __future__ import annotations

import errno
import gc
import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from noloco_node import __version__
from noloco_node.cli import bootstrap, doctor, join, journal, local_swarm, members, models, run_file, status
from noloco_node.errors import (
    COMPLAINT,
    Exit,
    UserError,
    causes,
    is_full_disk,
    leaves,
    reason_of,
    storage_error,
    usage_error,
)
from noloco_node.machine.signals import drop_output, is_closed_output
from noloco_node.terminal import LogLevel, complain, configure


class CommandGroup(TyperGroup):
    """Takes the logging options behind a command too; a reader may close the output early."""

    FLAG, LEVEL = "--log-json", "--log-level"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the logging options before the command; words behind `--` are no options."""
        end = args.index("--") if "--" in args else len(args)
        first: list[str] = []
        rest: list[str] = []
        words = iter(args[:end])
        for word in words:
            if word == self.LEVEL:
                value = next(words, None)
                if value is None:
                    return super().parse_args(ctx, [word])  # which is refused
                first += [word, value]
            else:
                (first if word == self.FLAG or word.startswith(f"{self.LEVEL}=") else rest).append(word)
        return super().parse_args(ctx, [*first, *rest, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a reader that closes the pipe, as `head` does, or the terminal has read enough."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except (OSError, BaseExceptionGroup) as error:
            if not is_closed_output(error):
                raise
            drop_output()
            raise typer.Exit from None


def _with_flat_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with each field of its parameter `options`, a dataclass, as an option of its own.

    Typer reads the options of a command from its signature.
    """
    signature = inspect.signature(command, eval_str=True)
    if "options" not in signature.parameters:
        return command
    kind = signature.parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)

    @wraps(command)
    def flat(**given: Any) -> None:
        command(options=kind(**{field.name: given.pop(field.name) for field in fields(kind)}), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *(each for each in signature.parameters.values() if each.name != "options"),
        *(
            inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
            for each in fields(kind)
        ),
    ]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return flat


app = typer.Typer(
    name="noloco-node",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a language model together with strangers: each peer holds one stage of the model, sends microbatches "
    "along random routes, and draws together with one random partner a round. No all-reduce, no coordinator.",
)
for _command in (
    run_file.init,
    run_file.check,
    run_file.data,
    bootstrap.bootstrap,
    join.join,
    members.members,
    status.status,
    status.watch,
    journal.me,
    doctor.doctor,
    models.export,
    models.evaluate,
    models.generate,
    local_swarm.demo,
    local_swarm.simulate,
):
    app.command()(_with_flat_options(_command))
app.add_typer(journal.journal, name="journal")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noloco-node {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(metavar="LEVEL", help="Least that is said: debug, info, warning or error.")
    ] = LogLevel.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Say it as JSON, one object a line.")] = False,
) -> None:
    configure(log_level, as_json=log_json)


def _trouble_of(error: BaseException) -> UserError | None:
    """Return what a person can do about an error, or about each cause of a group; None if the program is at fault."""
    found = [each if isinstance(each, UserError) else _refusal_of(each) for each in causes(error)]
    troubles = [each for each in found if each is not None]
    return troubles[0] if troubles and len(troubles) == len(found) else None


def _refusal_of(error: BaseException) -> UserError | None:
    """Return what a person can do about an error of the system; None if only the program can be at fault."""
    if not isinstance(error, OSError):
        return None
    if is_full_disk(error):
        what = "What the command returns or keeps cannot be written."
        return storage_error(what, why=reason_of(error), hint="free some space, or write to another disk")
    if error.filename is not None and error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP):
        what = "A file or directory that the command needs cannot be used."
        return usage_error(what, why=reason_of(error), hint="another path, or the rights to this one")
    return None


def main() -> None:
    """Run the command line and leave with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what no terminal can show ends no command, as on the standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (UserError, OSError, BaseExceptionGroup) as error:
        trouble = _trouble_of(error)
        if trouble is None:
            if isinstance(error, BaseExceptionGroup):  # a traceback leaves out what is ten groups deep
                raise BaseExceptionGroup("an error that the program does not know", leaves(error)) from None
            raise
        if trouble.code is Exit.STORAGE and trouble not in causes(error):
            # What is left of the output would be refused once more.
            drop_output()
        complain(f"{COMPLAINT}{trouble}")
        sys.exit(trouble.code)
    finally:
        gc.freeze()  # or the interpreter spends a second on the graveyard of torch before it is gone
