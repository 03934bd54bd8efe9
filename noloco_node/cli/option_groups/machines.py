"""The machines that `init` plans for and `check` forecasts on, as a person names them."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noloco_node.errors import config_error
from noloco_node.limits.budget import read_rate, read_size
from noloco_node.run.presets import machines_of

if TYPE_CHECKING:
    from noloco_node.planning.throughput import Machines

USUAL: dict[str, Any] = {
    "peers": 16,
    "gpu": "24GiB",
    "ram": "32GiB",
    "line": "100mbit",
    "tflops": 60.0,
    "latency_ms": 60.0,
}
"""What is left out of machines that are named, in the order in which they are told."""


@dataclass(frozen=True)
class MachineOptions:
    """Equal machines. Where none of these is given, nothing is planned; else those left out are as USUAL."""

    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a machine's GPU.", show_default=USUAL["gpu"])
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Main memory of a machine that is free.", show_default=USUAL["ram"]),
    ] = None
    line: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="A machine's line: 100mbit, or down and up 100mbit/20mbit.", show_default=USUAL["line"]
        ),
    ] = None
    peers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=20_000, help="Machines in all.", show_default=str(USUAL["peers"])),
    ] = None
    tflops: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.001,
            max=1e6,
            help="10^12 operations a second of a GPU, as reached in training.",
            show_default=f"{USUAL['tflops']:g}",
        ),
    ] = None
    latency_ms: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            max=6e4,
            help="Of a message between two machines.",
            show_default=f"{USUAL['latency_ms']:g}",
        ),
    ] = None

    @property
    def are_given(self) -> bool:
        """Whether machines were named."""
        return self != MachineOptions()

    def completed_from(self, path: Path) -> MachineOptions:
        """Return these, with what was left out as the comment of the run file at `path` names it, if it names any.

        Raises `UserError` (Exit.CONFIG) where that cannot be read.
        """
        named = machines_of(path.read_text(encoding="utf-8"))
        if named is None:
            return self
        try:
            words = shlex.split(named)
            pairs = zip(words[::2], words[1::2], strict=True)
            found = {word.removeprefix("--").replace("-", "_"): value for word, value in pairs}
            read = {name: type(USUAL.get(name, ""))(value) for name, value in found.items()}
            return MachineOptions(**read | self._given())
        except (ValueError, TypeError) as error:
            raise config_error(
                f"The comment of {path} names machines that cannot be read.",
                f"{error}: {named}",
                f"write  noloco-node check FILE {MachineOptions().in_words()}  or take that line out",
            ) from error

    def in_words(self) -> str:
        """Return them as they are typed, those that were left out too."""
        told = ((name, f"{each:g}" if isinstance(each, float) else each) for name, each in self._all().items())
        return " ".join(f"--{name.replace('_', '-')} {each}" for name, each in told)

    def machines(self) -> Machines:
        """Return the machines; raise `UserError` (Exit.USAGE) where they cannot be read."""
        figures = self.figures()  # a refusal comes before torch is loaded
        from noloco_node.planning.throughput import Machines

        return Machines(**figures)

    def figures(self) -> dict[str, Any]:
        """Return the fields of the machines; raise `UserError` (Exit.USAGE) where they cannot be read."""
        all_ = self._all()
        down, both, up = all_["line"].partition("/")
        return {
            "count": all_["peers"],
            "gpu_bytes": read_size(all_["gpu"], "--gpu", "24GiB or 80GB"),
            "ram_bytes": read_size(all_["ram"], "--ram", "32GiB or 64GB"),
            "up_bytes_per_s": read_rate(up if both else down, "--line"),
            "down_bytes_per_s": read_rate(down, "--line"),
            "flops": 1e12 * all_["tflops"],
            "latency_s": all_["latency_ms"] / 1000,
        }

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _all(self) -> dict[str, Any]:
        return USUAL | self._given()
