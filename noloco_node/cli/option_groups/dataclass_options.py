"""A dataclass whose fields are options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def taking(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command take each field of a dataclass as an option of its own, in place of its parameter `options`.

    Typer reads the options of a command from its signature.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints, signature = get_type_hints(kind, include_extras=True), inspect.signature(command, eval_str=True)

        def flat(**given: Any) -> None:
            options = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            command(**given, options=options)

        others = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
        options = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(kind)
        ]
        flat.__name__, flat.__doc__ = command.__name__, command.__doc__
        flat.__annotations__ = {parameter.name: parameter.annotation for parameter in (*others, *options)}
        flat.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
        return flat

    return decorate
