"""`noloco-node init`, `check` and `data`: write a run file, explain one, also for given machines, and show its data."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noloco_node.admission.owner_files import key_file, make_key, public_half, save_key
from noloco_node.cli import options as shared
from noloco_node.errors import UserError, config_error, os_errors_as, storage_error, usage_error
from noloco_node.limits.budget import read_owner_limits, read_rate, read_size
from noloco_node.machine.signals import unwound
from noloco_node.run.config import AdmissionRule
from noloco_node.run.fields import converted
from noloco_node.run.presets import check_free, check_named, machines_of, run_text, with_owner, with_values, write_text
from noloco_node.run.runfile import decode_run, load_run, read_run_text
from noloco_node.storage.atomic_file import make_directory
from noloco_node.storage.home import typed
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig

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
"""Defaults of machines, in the order in which messages list them."""

ALL_LAYERS, ANY_BASE = NO_ADAPTER.targets[0], "auto"


def _machine_option(name: str, metavar: str, what: str, *, min: float | None = None, max: float | None = None) -> Any:
    usual = USUAL[name]
    shown = usual if isinstance(usual, str) else f"{usual:g}"
    return typer.Option(metavar=metavar, help=what, min=min, max=max, show_default=shown)


@dataclass(frozen=True)
class MachineOptions:
    """Equal machines. Options left out are as in USUAL; if all are left out, nothing is planned."""

    gpu: Annotated[str | None, _machine_option("gpu", "SIZE", "Memory of a machine's GPU.")] = None
    ram: Annotated[str | None, _machine_option("ram", "SIZE", "Main memory of a machine that is free.")] = None
    line: Annotated[
        str | None, _machine_option("line", "RATE", "A machine's line: 100mbit, or down and up 100mbit/20mbit.")
    ] = None
    peers: Annotated[int | None, _machine_option("peers", "N", "Machines in all.", min=1, max=20_000)] = None
    tflops: Annotated[
        float | None,
        _machine_option(
            "tflops", "X", "10^12 operations a second of a GPU, as reached in training.", min=0.001, max=1e6
        ),
    ] = None
    latency_ms: Annotated[
        float | None, _machine_option("latency_ms", "X", "Of a message between two machines.", min=0.0, max=6e4)
    ] = None

    @property
    def are_given(self) -> bool:
        return self != MachineOptions()

    def completed_from(self, text: str, path: Path) -> MachineOptions:
        """Return these, completed by the machines that the comment of a run file, its text from `path`, names, if any.

        Raises `UserError` (Exit.CONFIG) if that comment cannot be read.
        """
        named = machines_of(text)
        if named is None:
            return self
        try:
            words = shlex.split(named)
            pairs = zip(words[::2], words[1::2], strict=True)
            found = {word.removeprefix("--").replace("-", "_"): value for word, value in pairs}
            read = {name: type(USUAL.get(name, ""))(value) for name, value in found.items()}
            completed = MachineOptions(**read | self._given())
            shared.check_values(completed)
            return completed
        except (ValueError, TypeError, UserError) as error:
            why = error.why if isinstance(error, UserError) else error
            raise config_error(
                f"The comment of {path} names machines that cannot be read.",
                f"{why}: {named}",
                f"write  noloco-node check FILE {MachineOptions().in_words()}  or take that line out",
            ) from error

    def in_words(self) -> str:
        """Return all options as a person types them."""
        told = ((name, f"{each:g}" if isinstance(each, float) else each) for name, each in self._all().items())
        return " ".join(f"--{name.replace('_', '-')} {each}" for name, each in told)

    def machines(self) -> Machines:
        figures = self.figures()  # a refusal comes before torch is loaded
        from noloco_node.planning.throughput import Machines

        return Machines(**figures)

    def figures(self) -> dict[str, Any]:
        """Return the fields of `Machines`; raise `UserError` (USAGE) if one cannot be read."""
        all_ = self._all()
        rates = all_["line"].split("/")
        if len(rates) > 2 or not all(rates):
            raise usage_error(
                f"--line {all_['line']!r} cannot be used.",
                why="it is neither one rate nor two with a slash between them",
                hint="--line 100mbit, or down and up: --line 100mbit/20mbit",
            )
        return {
            "count": all_["peers"],
            "gpu_bytes": read_size(all_["gpu"], "--gpu", "24GiB or 80GB"),
            "ram_bytes": read_size(all_["ram"], "--ram", "32GiB or 64GB"),
            "up_bytes_per_s": read_rate(rates[-1], "--line"),
            "down_bytes_per_s": read_rate(rates[0], "--line"),
            "flops": 1e12 * all_["tflops"],
            "latency_s": all_["latency_ms"] / 1000,
        }

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _all(self) -> dict[str, Any]:
        return USUAL | self._given()


def init(
    options: MachineOptions,
    path: Annotated[Path, typer.Argument(help="Where to write the run file.")] = Path("run.toml"),
    preset: Annotated[str, typer.Option(help="Size of the model: tiny, 125m, 1b or 7b.")] = "tiny",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Go on from an exported checkpoint.", callback=shared.directory_there
        ),
    ] = None,
    admission: Annotated[
        AdmissionRule | None,
        typer.Option(
            metavar="RULE",
            help="Give the run an owner who says who may take part: open (a ticket for every peer that works for it), "
            "invited (an invite is for one identity) or listed.",
            show_default="no owner: whoever has the invite",
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            metavar="RANK",
            min=1,
            max=4096,
            help="With --from: train low-rank adapters of this rank, and leave the model's own weights as they are.",
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="NAMES", help="Layers that have an adapter, by name: q_proj,v_proj; or all-linear.")
    ] = ALL_LAYERS,
    base: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="Form of the model's own weights: float32, bfloat16, int8, nf4; auto: by the machines, or bfloat16.",
        ),
    ] = ANY_BASE,
) -> None:
    """Write a commented run file, the recipe that all peers of a run share.

    With machines (any of --gpu, --ram, --line, --peers, --tflops, --latency-ms)
    the command plans the run for them: stages, windows, codec and rounds for the
    most tokens a second that fit, with the preset's budget of tokens.
    """
    with unwound():
        adapter, any_base = adapter_of(origin, lora, target, base), lora is not None and base == ANY_BASE
        typer.echo(write_run(path, preset, origin, admission, options, adapter, any_base=any_base, overwrite=force))


def adapter_of(origin: Path | None, rank: int | None, targets: str, base: str) -> AdapterConfig:
    """Return the adapters that a person asks for; raise `UserError` if that is no adapter."""
    if rank is None:
        if (targets, base) != (ALL_LAYERS, ANY_BASE):
            raise usage_error(
                "There are no adapters that --target and --base could shape.",
                why="both say what adapters are like, and only --lora makes a run of adapters",
                hint="add --lora RANK, or leave --target and --base out",
            )
        return NO_ADAPTER
    if origin is None:
        raise usage_error(
            "--lora has no model to adapt.",
            why="adapters are trained over a finished model",
            hint="noloco-node init --from DIR --lora RANK",
        )
    names = [each.strip() for each in targets.split(",") if each.strip()]
    form = NO_ADAPTER.base if base == ANY_BASE else base
    table = {"rank": rank, "alpha": 2.0 * rank, "targets": names, "base": form}
    return converted(table, AdapterConfig, "the adapter of --lora")


def write_run(
    path: Path,
    preset: str,
    origin: Path | None,
    rule: AdmissionRule | None,
    options: MachineOptions,
    adapter: AdapterConfig = NO_ADAPTER,
    *,
    any_base: bool = False,
    overwrite: bool,
) -> str:
    """Write a run file, with an owner if there is a rule; return what was done. An existing key stays.

    `origin`: a checkpoint to go on from; `adapter`: what is trained of it, with `any_base` in the form of the model
    that suits the machines. `options`: machines to plan for, if any.
    """
    options.figures()
    check_named(path)
    if not overwrite:
        check_free(path)
    if origin is None:
        text = run_text(preset)
    else:
        from noloco_node.export.continue_run import continuing_text

        text = continuing_text(origin, preset, adapter)
    text, expected = _planned(text, preset, options, any_base=any_base)
    with os_errors_as(storage_error, f"There is no place for {path}.", "a path in a directory that is yours"):
        make_directory(path.parent)
    advice = f"Read {path}, change what you like, then:  {shlex.join(('noloco-node', 'check', str(path)))}"
    if origin is not None:
        from noloco_node.export.frozen_files import with_frozen_files

        frozen = path.with_name(f"{path.stem}-frozen")
        plain, text = text, with_frozen_files(text, origin, frozen, overwrite=overwrite)
        served = origin if text == plain else frozen
        command = shlex.join(("noloco-node", "bootstrap", "--run", str(path), "--weights", str(served)))
        advice += f"\nThe other nodes fetch the model from a peer that has it:  {command}"
    if rule is None:
        write_text(path, text, overwrite=overwrite)
        return f"Wrote {path}.\n{advice}{expected}"
    key = make_key(path)
    write_text(path, with_owner(text, public_half(key), rule), overwrite=overwrite)
    save_key(path, key)
    owner = f"{key_file(path)} is the key of this run's owner, for nobody else."
    return f"Wrote {path}.\n{owner}\n{advice}{expected}"


def _planned(text: str, preset: str, options: MachineOptions, *, any_base: bool) -> tuple[str, str]:
    """Return the text of a run for these machines, and what to expect of it; the same text and nothing for none."""
    if not options.are_given:
        return text, ""
    from noloco_node.planning import expectation
    from noloco_node.planning.search import plan_for, plan_in_any_form

    run, machines = decode_run(text, f"the preset {preset}"), options.machines()
    planned = plan_in_any_form(run, machines) if any_base else plan_for(run, machines)
    planned = planned._replace(run=expectation.with_evaluations(planned.run))
    changes = "\n".join(["", *expectation.describe_changes(planned, run, machines)]).rstrip("\n")
    expected = "\n".join(["\n", *expectation.describe_expectation(planned, machines)])
    return with_values(text, expectation.planned_values(planned.run), options.in_words()), changes + expected


def check(
    options: MachineOptions,
    path: Annotated[Path, typer.Argument(help="A run file.")] = Path("run.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of sentences.")] = False,
    max_upload: shared.UploadOption = None,
    max_download: shared.DownloadOption = None,
    monthly_cap: shared.CapOption = None,
) -> None:
    """Explain a run file (memory, bytes, work, efficiency), or say which field is wrong and why.

    As text, the report also says what to expect on the machines that the file's
    comment or the options name, and what a bandwidth budget carries.
    """
    # Refuse bad values before loading torch and before a long report.
    allowance = read_owner_limits(max_upload, max_download, monthly_cap, None)
    _, text = options.figures(), read_run_text(path)
    run = decode_run(text, str(path))
    from noloco_node.planning import bandwidth, expectation
    from noloco_node.planning.plan_text import fitted, report

    typer.echo(report(run, as_json=as_json))
    if run.data.has_rows and not as_json:
        typer.echo(f"What it learns of its rows is shown by:  {shlex.join(('noloco-node', 'data', str(path)))}")
    if allowance.is_limited and not as_json:
        typer.echo("\n" + "\n".join(fitted(bandwidth.report(run, allowance))))
    if not as_json:
        options = options.completed_from(text, path)
        machines = options.machines() if options.are_given else None
        typer.echo("\n" + "\n".join(expectation.report_machines(run, machines)))


def data(
    path: Annotated[Path, typer.Argument(help="A run file.")] = Path("run.toml"),
    source: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="SRC", help="Local data to read instead of the run's: a file, directory or glob."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        shared.weights_option("The checkpoint that the run goes on from (init --from DIR), for its tokenizer."),
    ] = None,
) -> None:
    """Show three rows as a run reads them, with the tokens that are learnt marked, and count those that do not fit.

    Of text, three sequences. Exit code 14 when rows do not fit the form that
    the run file names; the message says in which file and line the first is.
    """
    run = load_run(path)
    read = run.data if source is None else run.data.with_source(source)
    from noloco_node.data.encoding import with_tokenizer_in
    from noloco_node.data.row_preview import preview

    read = read if weights is None else with_tokenizer_in(read, typed(weights))
    for line in preview(run, read):
        typer.echo(line)
