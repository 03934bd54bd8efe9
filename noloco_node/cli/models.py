"""`noloco-node export`, `evaluate` and `generate`: take the model home, measure it, let it write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from noloco_node.cli import options as shared
from noloco_node.errors import usage_error
from noloco_node.export.hub import check_push, push
from noloco_node.export.sources import check_export, check_models
from noloco_node.machine.signals import run, unwound
from noloco_node.swarm.access import Visitor
from noloco_node.swarm.invite import found

AdaptedOption = Annotated[
    Path | None,
    shared.weights_option(
        "The model that an adapter is for (init --from DIR).",
        show_default="the one that adapter_config.json names",
    ),
]
HomesOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="HOME",
        help="Home of a node of the run: its checkpoint, and the snapshots it keeps. May be given more than once.",
    ),
]


@dataclass(frozen=True)
class ExportOptions:
    """The options of `export`, but for its directory."""

    from_home: HomesOption = None
    local: shared.LocalOption = None
    home: shared.HomeOption = None
    owner_run: shared.OwnerOption = shared.OWNER_RUN
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run of adapters: the whole model, adapters added to its weights.")
    ] = False
    weights: Annotated[
        Path | None,
        shared.weights_option(
            "The checkpoint that a run of adapters started from (init --from DIR), or the frozen model that init"
            " wrote: to merge, and to judge replicas by their loss."
        ),
    ] = None
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="With --from-home: the weights of the best evaluation that these homes have kept, of one peer.",
        ),
    ] = False
    push_to: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Send the checkpoint to this model of the Hugging Face hub too, made there and private if it is new.",
        ),
    ] = None
    public: Annotated[bool, typer.Option("--public", help="With --push: a new model is for everybody to read.")] = False


def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the checkpoint.")],
    options: ExportOptions,
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE", help="Invite of a living swarm, or a home that keeps one.", callback=shared.invite_text
        ),
    ] = None,
) -> None:
    """Gather every stage, average its replicas, write one Hugging Face checkpoint; after an interruption, go on.

    A run of adapters is written as PEFT's files, or with --merge as a whole model.
    """
    place, homes = options.home or shared.default_home("node"), options.from_home or ()
    given = None if invite is None else found(invite, place)
    check_export(out, given, homes, best=options.best)
    if options.push_to is not None:
        check_push(options.push_to)
    elif options.public:
        raise usage_error(
            "There is nothing to make public.", "--public was given without --push", "add --push OWNER/NAME"
        )
    from noloco_node.export.adapter_files import AdapterExport
    from noloco_node.export.exporter import export as export_model

    visitor = Visitor(tuple(options.local or ()), place, options.owner_run)
    wanted = AdapterExport(options.merge, options.weights)
    typer.echo(run(export_model(out, given, homes, visitor, wanted, best=options.best)))
    if options.push_to is not None:
        with unwound():
            typer.echo(push(out, options.push_to, public=options.public))


def evaluate(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR",
            help="Directories that `export` wrote; other models and adapters with --data.",
            callback=shared.all_there,
        ),
    ] = None,
    from_home: HomesOption = None,
    weights: AdaptedOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text to evaluate on: a file, directory or glob, json:PATH, parquet:PATH, hub:OWNER/NAME@COMMIT. Of a "
            "run with a mixture also A+B, a place for each of its sources.",
            show_default="the run's held-out split",
        ),
    ] = None,
    batches: Annotated[
        int, typer.Option(metavar="N", min=1, help="At most so many batches of 8 sequences, spread over the text.")
    ] = 64,
    whole: Annotated[bool, typer.Option("--all", help="All of the text, however long that takes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a sentence.")] = False,
) -> None:
    """Print validation loss and perplexity of checkpoints and adapters, or of homes: merged, and each replica."""
    check_models(directories or (), from_home or (), weights)  # before torch is loaded
    from noloco_node.inference.evaluation import evaluate as evaluate_models

    most = None if whole else batches
    models, homes = directories or (), from_home or ()
    typer.echo(evaluate_models(models, homes, data=data, batches=most, as_json=as_json, weights=weights))


def generate(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A directory that `export` wrote, or another model or adapter.",
            callback=shared.directory_there,
        ),
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from; in a run of messages, what a user says.")],
    weights: AdaptedOption = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="X", min=0.0, max=100.0, help="0 takes the most probable token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(metavar="N", min=0, help="Draw from so many of the most probable; 0: from all.")
    ] = 40,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=shared.LARGEST_SEED, help="Equal seeds give equal texts.")
    ] = 0,
) -> None:
    """Let a checkpoint, or an adapter over one, go on from a prompt, token by token."""
    (model,) = check_models([directory], (), weights)  # before torch is loaded
    from noloco_node.data.token_text import Sampling
    from noloco_node.inference.generation import generate as pieces

    for piece in pieces(model, prompt, Sampling(max_tokens, temperature, top_k, seed)):
        typer.echo(piece, nl=False)
    typer.echo()
