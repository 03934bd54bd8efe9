"""The shell of noloco_node: every effect, every configuration, the command line, and the Python interface.

Names of the interface are found when they are first asked for, because they load torch and commands start without it.
"""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.5.3"
_HOMES = {
    "init": "run_files",
    "join": "peer",
    "Swarm": "swarm",
    "export": "swarm",
    "GossipOptimizer": "gossip_optimizer",
    "GossipCallback": "trainer_callback",
}
"""Each name of the interface (docs/python.md) with its module below `noloco_node.api`; __init__.pyi has their types."""


class _Package(ModuleType):
    """This package. Its name `export` is the function, also once the package `noloco_node.export` is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.api.{_HOMES[name]}"), name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_HOMES]


sys.modules[__name__].__class__ = _Package
