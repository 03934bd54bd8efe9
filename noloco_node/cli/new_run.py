"""`noloco-node init`: a run file, and beside it the key of its owner where it has one."""

from __future__ import annotations

from pathlib import Path

from noloco_node.admission.owner_files import key_file, make_key, public_half, save_key
from noloco_node.cli.option_groups.machines import MachineOptions
from noloco_node.run.config import AdmissionRule
from noloco_node.run.presets import run_text, with_owner, with_values, write_text
from noloco_node.run.runfile import decode_run


def write_run(
    path: Path,
    preset: str,
    origin: Path | None,
    rule: AdmissionRule | None,
    options: MachineOptions,
    *,
    overwrite: bool,
) -> str:
    """Write a run file, with an owner where there is a rule, and return what was done; a key that is there stays.

    `origin`: a checkpoint to go on from. `options`: machines for which it is planned, if there are any.
    """
    options.figures()
    if origin is None:
        text = run_text(preset)
    else:
        from noloco_node.cli.continue_run import continuing_text

        text = continuing_text(origin, preset)
    expected = ""
    if options.are_given:
        from noloco_node.planning.machine_text import describe_changes, describe_expectation, planned_values
        from noloco_node.planning.search import plan_for

        before, machines = decode_run(text, f"the preset {preset}"), options.machines()
        planned = plan_for(before, machines)
        text = with_values(text, planned_values(planned.run), options.in_words())
        expected = "\n".join(["\n", *describe_expectation(planned, machines)])
        expected = "\n".join(["", *describe_changes(planned, before, machines)]).rstrip("\n") + expected
    advice = f"Read {path}, change what you like, then:  noloco-node check {path}"
    if rule is None:
        write_text(path, text, overwrite=overwrite)
        return f"Wrote {path}. {advice}{expected}"
    key = make_key(path)
    write_text(path, with_owner(text, public_half(key), rule), overwrite=overwrite)
    save_key(path, key)
    return f"Wrote {path}, and {key_file(path)}: the key of this run's owner, for nobody else.\n{advice}{expected}"
