"""What all commands have in common: the options on what is said, and the end of the standard output."""

from __future__ import annotations

import os
import select
import sys
from typing import Any

import typer
from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Takes the options on what is said behind a command too, and lets a reader of the output leave."""

    FLAG, LEVEL = "--log-json", "--log-level"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put these options before the command; what follows `--` is none."""
        end = args.index("--") if "--" in args else len(args)
        first: list[str] = []
        rest: list[str] = []
        words = iter(args[:end])
        for word in words:
            if word == self.LEVEL:
                first += [word, *(value for value in [next(words, None)] if value is not None)]
            else:
                (first if word == self.FLAG or word.startswith(f"{self.LEVEL}=") else rest).append(word)
        return super().parse_args(ctx, [*first, *rest, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a reader that closes the pipe, as `head` does, has what it wanted."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            drop_output()
            raise typer.Exit from None


def drop_output() -> None:
    """Let the interpreter flush what is left of the standard output without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone() -> bool:
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))
