"""`noloco_node.join`: a node in this process trains a model of its own, and says what goes wrong, over real daemons."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA
from hypothesis import given
from hypothesis import strategies as st
from process_swarm import LOCAL, host
from processes import Commands
from torch import nn
from user_errors import user_error

import noloco_node
from noloco_node.api.peer import parsed
from noloco_node.cli.join import check_options
from noloco_node.cli.options import JoinOptions
from noloco_node.errors import Exit, UserError
from noloco_node.journal.events import Finished, InnerStep
from noloco_node.journal.reader import read
from noloco_node.swarm.invite import SCHEME

NOBODY = f"{SCHEME}{64 * '0'}@/ip4/127.0.0.1/tcp/9/p2p/12D3KooWPF6C68sQVQGmwSo176xFe1frMnCRiyPVqRBmFwdQRd1g"


@pytest.mark.network
def test_a_node_in_this_process_trains_to_the_end_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "noloco_node")
    with Commands() as commands:
        model = {"architecture": "llama", "sizes": LLAMA}
        one = {"pipeline": {"stages": 1, "microbatches_per_step": 2}}
        run = noloco_node.init(
            commands.directory / "run.toml", model, steps=6, replicas=1, batch=2, sequence_length=32, sections=one
        )
        _, invite = host(commands, run)
        home = commands.directory / "member"
        with noloco_node.join(invite, home=home, device="cpu", threads=1, listen=[LOCAL], refresh=0.5) as peer:
            assert peer.state in ("starting", "joining", "training")
            assert not peer.wait(0.0)
            assert peer.wait()
            assert peer.state == "finished"
            said = noloco_node.export(invite, tmp_path / "model", home=tmp_path)
        assert "AutoModelForCausalLM" in said
        assert "finished; serving the weights until we leave" in caplog.text
        assert peer.state == "left"
        peer.leave()
        events = list(read(home / "journal.jsonl"))
        assert len([event for event in events if isinstance(event, InnerStep)]) == 6
        assert [event.why for event in events if isinstance(event, Finished)] == ["the run is over"]


@pytest.mark.network
def test_a_node_that_cannot_train_the_run_says_why(tmp_path: Path) -> None:
    with Commands() as commands:
        run = noloco_node.init(commands.directory / "run.toml", nn.Linear(1, 1), steps=6)
        _, invite = host(commands, run)
        peer = noloco_node.join(invite, home=tmp_path, device="cpu", listen=[LOCAL])
        with pytest.raises(UserError, match="trains a foreign module") as refused:
            peer.wait()
        assert "GossipOptimizer" in refused.value.hint
        with pytest.raises(UserError, match="trains a foreign module"):
            peer.leave()


def test_what_cannot_be_read_is_refused_at_once(tmp_path: Path) -> None:
    with user_error(Exit.CONFIG):
        noloco_node.join("no invite", home=tmp_path)
    with pytest.raises(UserError, match="10 parsecs"):
        noloco_node.join("no invite", home=tmp_path, max_upload="10 parsecs")
    for name in ("max_uplaod", "linger", "devices"):
        with user_error(Exit.USAGE, f"There is no option {name}"):
            noloco_node.join("no invite", **{"home": tmp_path, name: 1})
    numbers = [("refresh", each) for each in (-1, math.nan, math.inf)] + [("keep", each) for each in (0, 2.5, True)]
    for name, number in [*numbers, ("threads", "all"), ("stage", -1), ("stage", 0.5), ("refresh", "1"), ("keep", "2")]:
        with pytest.raises(UserError, match="cannot be used"):
            noloco_node.join("no invite", home=tmp_path, **{name: number})
    kinds = [(name, 5) for name in ("home", "device", "max_upload", "max_memory", "name", "data", "listen", "weights")]
    for name, value in [*kinds, ("sample", [5]), ("log_to", [5]), ("relayed", "no"), ("begin_anew", 1)]:
        with pytest.raises(UserError, match=name):
            noloco_node.join(NOBODY, **{"home": tmp_path, name: value})
    check_options(JoinOptions(keep=torch.tensor(3), refresh=torch.tensor(0.5)))  # as of numpy
    for wrong in ({"device": "abacus"}, {"data": tmp_path / "nowhere"}, {"weights": tmp_path / "nowhere"}):
        with pytest.raises(UserError, match=r"abacus|nowhere"):
            noloco_node.join("no invite", home=tmp_path, **wrong)
    with pytest.raises(UserError):
        noloco_node.Swarm("no invite", home=tmp_path)


def test_what_is_no_path_is_refused_in_words(tmp_path: Path) -> None:
    for path in (3, b"home", None):
        calls: list[Callable[[Any], object]] = [
            lambda given: noloco_node.export(None, tmp_path / "out", homes=given),
            lambda given: noloco_node.export(None, tmp_path / "out", homes=[given]),
            lambda given: noloco_node.export(None, given, homes=tmp_path),
            lambda given: noloco_node.init(given, {}, steps=1),
        ]
        for call in calls:
            with user_error(Exit.USAGE, "is no path"):
                call(path)


def test_a_text_in_place_of_several_is_one_of_them(tmp_path: Path) -> None:
    _, read = parsed(NOBODY, {"home": tmp_path, "sample": "Once", "listen": LOCAL, "log_to": ()})
    assert read.prompts == ("Once",)
    assert (read.listen, read.log_to) == ([LOCAL], [])


def test_a_program_may_go_to_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").mkdir()
    _, read = parsed(NOBODY, {"home": "h", "weights": "w"})
    assert (read.home, read.weights) == (tmp_path / "h", tmp_path / "w")
    assert noloco_node.Swarm(NOBODY, home="h")._visitor.home == tmp_path / "h"


@given(
    st.lists(st.sampled_from("abc"), max_size=4), st.sampled_from([str, Path]), st.sampled_from([tuple, iter, deque])
)
def test_several_are_taken_as_paths_and_from_anything_iterable(
    names: list[str], kind: type[str | Path], several: Callable[[list[str | Path]], Iterable[str | Path]]
) -> None:
    options = {name: several([kind(each) for each in names]) for name in ("local", "sample")}
    _, read = parsed(NOBODY, options | {"listen": several([LOCAL])})
    assert (read.local, read.sample, read.listen) == (names, names, [LOCAL])
    assert parsed(NOBODY, {"local": kind("ab")})[1].local == ["ab"]


@pytest.mark.network
def test_a_node_leaves_before_it_has_found_anybody(tmp_path: Path) -> None:
    with noloco_node.join(NOBODY, home=tmp_path, device="cpu", listen=[LOCAL]) as peer:
        pass
    assert not peer.wait(), "it has left, and the run is not over"
