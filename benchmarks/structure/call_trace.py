"""Records which functions of the product run, in every thread, and which modules lie between one and a socket."""

from __future__ import annotations

import ast
import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from benchmarks.structure.source import ROOT

T = TypeVar("T")
LoopMaker = Callable[[], asyncio.AbstractEventLoop]

PRODUCT_FOLDERS = tuple(f"{ROOT / name}/" for name in ("gossip", "pipeline", "noloco_node"))


@cache
def module_of(path: str) -> str | None:
    """Return the name of the product's module in a file; None for any other file."""
    if not path.startswith(PRODUCT_FOLDERS):
        return None
    return ".".join(Path(path).relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def does_something(code: CodeType) -> bool:
    """Say whether the code is a function with more than a trivial body.

    Trivial are: module and class bodies, lambdas and comprehensions; bodies that return a value or assign values
    without a call; properties of one statement; functions that a dataclass generates.
    """
    function = _functions(code.co_filename).get((code.co_name, code.co_firstlineno))
    if function is None:
        return False
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    is_property = any(
        ast.unparse(decorator) in ("property", "cached_property") for decorator in function.decorator_list
    )
    plain = all(isinstance(node, ast.Pass | ast.Return | ast.Assign | ast.AnnAssign) for node in body)
    calls = any(isinstance(node, ast.Call | ast.Await | ast.Yield) for part in body for node in ast.walk(part))
    return not (is_property and len(body) <= 1) and not (plain and not calls)


@cache
def _functions(path: str) -> dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(Path(path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {(node.name, min(d.lineno for d in [node, *node.decorator_list])): node for node in found}


class CallTrace:
    """Records calls of functions of the product while it is on; a thread has to begin after `watch`.

    `layers`: the most modules on a stack that leads from `top` to a write into a socket. `on_stacks`: all modules that
    were on a stack at such a write.
    """

    def __init__(self, top: str = "") -> None:
        self.layers: tuple[str, ...] = ()
        self.on_stacks: dict[str, None] = {}
        self._top = top
        self._on = False
        self._codes: dict[CodeType, None] = {}
        self._creators: WeakKeyDictionary[asyncio.Task[Any], tuple[str, ...]] = WeakKeyDictionary()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at every call of this thread, and of those that begin in the body."""
        sys.setprofile(self._look)
        threading.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        """Forget what was recorded, and record from now on."""
        self._codes, self._on = {}, True

    def end(self) -> list[CodeType]:
        """Stop recording; return the product's functions that ran, in the order of their first calls."""
        self._on = False
        return [code for code in list(self._codes) if module_of(code.co_filename)]

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if self._on and event == "call":
            code = frame.f_code
            self._codes[code] = None
            if code.co_name == "write" and code.co_filename.endswith("selector_events.py"):
                stack = self.stack(frame)
                self.on_stacks |= dict.fromkeys(stack)
                layers = stack[stack.index(self._top) :] if self._top in stack else ()
                self.layers = max(self.layers, layers, key=len)

    def run(self, main: Coroutine[Any, Any, T], make_loop: LoopMaker = asyncio.SelectorEventLoop) -> T:
        """Run a program on a loop whose writes into sockets are functions of Python, and know who begins its tasks."""
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.get_loop().set_task_factory(self.begin_task)
            return runner.run(main)

    def begin_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Begin a task, and remember the modules on the stack of the caller."""
        task = asyncio.Task(work, loop=loop, **options)
        self._creators[task] = self.stack(sys._getframe(1))
        return task

    def stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the product's modules on a stack of this thread, each once, the outermost first.

        The stack holds the callers and awaiting coroutines of a frame, and those that began its task.
        """
        found: dict[str, None] = {}
        while frame is not None:
            name = module_of(frame.f_code.co_filename)
            if name is not None:
                found[name] = None
            frame = frame.f_back
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        above = () if task is None else self._creators.get(task, ())
        return tuple(dict.fromkeys((*above, *reversed(found))))


def modules(codes: list[CodeType], without: list[CodeType] | None = None) -> list[str]:
    """Return the modules of which a function with more than a trivial body ran, in the order of first calls.

    `without`: functions that run anyway, while nothing is followed.
    """
    idle = set(without or ())
    names = [module_of(code.co_filename) for code in codes if code not in idle and does_something(code)]
    return list(dict.fromkeys(name for name in names if name is not None))
