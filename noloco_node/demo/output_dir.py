"""Where a demo leaves what it makes: one directory, never over somebody's files.

    noloco-demo/
        demo.json               which demo this was; marks the directory as a demo's
        run.toml                the run file, its step budget frozen
        bootstrap/ 0a/ 0b/ ...  the homes of the peers: journal, identity, output
        model/                  the merged model, a Hugging Face directory
        loss.png summary.txt summary.json

An earlier demo's directory is left as it is, and the next free number taken (`noloco-demo-2`).
"""

from __future__ import annotations

from pathlib import Path

from noloco_node.errors import Exit, UserError
from noloco_node.storage.atomic_file import write_whole
from noloco_node.storage.home import Home

MARK = "demo.json"
NUMBERS = 1000


def claim_output_dir(wanted: Path, mark: bytes) -> Home:
    """Lock `wanted`, or its next free number where an earlier demo lies there, and write `mark` into it.

    Raises `UserError` where it holds other files, or cannot be written.
    """
    wanted = wanted.expanduser().absolute()
    if (names := _names(wanted)) and MARK not in names:
        raise UserError(
            f"{wanted} is not empty, and not a demo's",
            why=f"it holds {', '.join(sorted(names)[:5])}",
            hint="give another directory with --home",
            code=Exit.USAGE,
        )
    for number in range(1, NUMBERS):
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if _names(candidate):
            continue
        try:
            home = Home.open(candidate)
        except UserError as trouble:
            if trouble.code is Exit.HOME_IN_USE:  # another demo, a moment ahead of us
                continue
            raise
        write_whole(home.path / MARK, mark)
        return home
    raise UserError(
        f"{NUMBERS} demos lie beside {wanted}",
        why="each keeps its directory",
        hint="remove some of them, or give another directory with --home",
        code=Exit.USAGE,
    )


def _names(path: Path) -> set[str]:
    """Return what is in a directory; the lock of a demo that died at once does not count."""
    try:
        return {entry.name for entry in path.iterdir()} - {"lock"}
    except (FileNotFoundError, NotADirectoryError):
        return set()
