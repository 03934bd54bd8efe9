"""Tests that are coroutine functions: a decorator runs each as its module runs coroutines."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def run_by(runner: Callable[..., Any], *before: Any, gives: int = 0, **options: Any) -> Callable[..., Any]:
    """Run a coroutine function as a test, by `runner(*before, function, **options)`.

    The runner gives the first `gives` arguments itself; pytest gives the others, by their names.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            runner(*before, partial(function, **arguments), **options)

        signature = inspect.signature(function)
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values()][gives:])
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.pytestmark = getattr(function, "pytestmark", [])
        return test

    return decorate
