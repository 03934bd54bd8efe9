"""Sending an export to the Hugging Face hub (`noloco-node export --push`). Its library is loaded where it is called."""

from __future__ import annotations

import re
from pathlib import Path

from noloco_node.errors import Exit, UserError, one_line, usage_error

_MODEL_NAME = re.compile(r"\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)


def check_push(name: str) -> None:
    """Raise `UserError` before anything is gathered: `name` is no OWNER/NAME, or the hub takes no token from here."""
    from huggingface_hub import HfApi, get_token

    if not _MODEL_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise usage_error(
            f"--push cannot send to {name!r}.", "a model of the hub is called OWNER/NAME", "--push yourself/your-model"
        )
    if get_token() is None:
        raise usage_error(
            "--push has no token for the hub.",
            why="neither HF_TOKEN is set nor has anybody logged in on this machine",
            hint="`hf auth login` with a token that may write, or leave --push out and send the directory later",
        )
    try:
        HfApi().whoami()
    except Exception as error:
        raise _refused(
            "The hub does not answer to this token.", error, "`hf auth whoami`; or leave --push out"
        ) from error


def push(directory: Path, name: str, *, public: bool) -> str:
    """Send an export to the model `name`, made if it is not there; return what was done, in words.

    Raises `UserError` (UNREACHABLE) if the hub does not take it; the directory stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message="Send an export of noloco_node")
    except Exception as error:
        hint = f"`hf upload {name} {directory}` when it can be reached"
        raise _refused(f"{directory} is written, and {name} did not take it.", error, hint) from error
    return f"Sent to {url}."


def _refused(what: str, error: Exception, hint: str) -> UserError:
    # The hub's library raises errors of several other packages.
    return UserError(what, why=one_line(error), hint=hint, code=Exit.UNREACHABLE)
