"""What `join` adds to what a node says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from noloco_node.cli.join import _record
from noloco_node.journal import events, reader
from noloco_node.journal.writer import Journal
from noloco_node.web.served_views import ServedViews


def test_the_journal_says_which_process_and_which_device(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        views, begun = ServedViews(None, None), events.Started(peer="a", stage=0, run="r", version="1")
        _record(journal, views, torch.device("cuda:1"), begun)
        _record(journal, views, torch.device("cpu"), events.StateChanged(state="training"))
    started, changed = reader.read(path)
    assert (started.pid, started.device) == (os.getpid(), "cuda:1")
    assert isinstance(changed, events.StateChanged)
