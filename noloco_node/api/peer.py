"""`join`: a node in this process, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from math import inf
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack
from weakref import WeakMethod

from noloco_node.api.loop_thread import LoopThread
from noloco_node.cli.join import check_options, take_part
from noloco_node.cli.options import JoinOptions, default_home, invite_text
from noloco_node.errors import usage_error
from noloco_node.journal import events
from noloco_node.machine.signals import Departure
from noloco_node.run.peer_state import PeerState
from noloco_node.storage.home import typed
from noloco_node.swarm import invite as invites
from noloco_node.swarm.invite import Invite

if TYPE_CHECKING:
    from torch import nn

    from noloco_node.cli.join import PrepareMachine

STAYS_S = inf  # a peer serves its weights until it is asked to leave
_NOT_FOR_PROGRAMS = {"linger", "devices"}  # options of the command that a node in a program has not


class PeerOptions(TypedDict, total=False):
    """What the owner of this machine chooses for a peer; each is an option of `noloco-node join` (docs/reference.md).

    `home`: the directory of the peer, ~/.noloco/node by default; one running peer each. `name`: shown beside its id.
    `weights`: the directory with the weights that the run starts from. `refresh`: seconds between two readings of the
    roster. `log_to`: what draws curves.
    """

    home: str | PathLike[str]
    name: str
    listen: Sequence[str]
    announce: Sequence[str]
    relayed: bool
    weights: str | PathLike[str]
    max_upload: str
    max_download: str
    keep: int
    refresh: float
    log_to: Sequence[str]
    begin_anew: bool


class OwnModelOptions(PeerOptions, total=False):
    """More options for a run that trains a model of its own: device, text, stage, CPU threads, memory, prompts."""

    device: str
    data: str
    stage: int
    threads: int
    max_memory: str
    max_ram: str
    sample: Sequence[str]


def parsed(invite: str | PathLike[str], options: Mapping[str, object]) -> tuple[Invite, JoinOptions]:
    """Return an invite (its text, a file that holds it, or a home that keeps one) and the options of a node.

    Raises `UserError` for what cannot be read.
    """
    given: dict[str, Any] = dict(options)
    if unknown := given.keys() - {each.name for each in fields(JoinOptions)} | given.keys() & _NOT_FOR_PROGRAMS:
        hint = "the options of `noloco-node join`, such as max_upload for --max-upload (docs/python.md)"
        raise usage_error(f"There is no option {min(unknown)}.", "a misspelt one would silently do nothing", hint)
    paths = {name: given[name] for name in ("home", "weights") if isinstance(given.get(name), str | PathLike)}
    # The node reads them when the program may be in another directory.
    given |= {name: typed(path).absolute() for name, path in paths.items()}
    if isinstance(given.get("data"), PathLike):
        given["data"] = fspath(given["data"])
    for name in given.keys() & {"listen", "announce", "local", "sample", "log_to"}:
        # A text is iterable too: over its letters.
        several = [given[name]] if isinstance(given[name], str | PathLike) else given[name]
        if isinstance(several, Iterable):
            given[name] = [fspath(each) if isinstance(each, PathLike) else each for each in several]
    read = JoinOptions(**given)
    check_options(read)
    read = replace(read, linger=STAYS_S)
    return invites.parse(invites.found(invite_text(str(invite)), read.home or default_home("node"))), read


class NodeThread(LoopThread[None]):
    """A node in a thread of its own. `changed`: called in that thread when its state changes, or it has ended."""

    def __init__(
        self,
        invite: Invite,
        options: JoinOptions,
        prepare: PrepareMachine | None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.state: PeerState | None = None  # the state that the node announces; None until it has found the run
        self.run_is_over = False
        self.has_finished = threading.Event()  # set once the run is over, or the node has ended
        self._departure: Departure | None = None
        self._changed, self._leaves = changed, False

        async def live() -> None:
            await take_part(invite, options, self._departs, prepare, self._observe)

        super().__init__(live, "noloco-node", self._note_end)

    def result(self) -> None:
        """Wait for the end; raise what ended the node. To be asked to leave is no error."""
        try:
            super().result()
        except asyncio.CancelledError:
            if not self._leaves:
                raise

    def ask_to_leave(self) -> None:
        """Let the node leave: politely if others know of it, else at once."""
        self._leaves = True
        if self._departure is None:
            self.cancel()
        else:
            self.call(self._leave)

    def _leave(self) -> None:
        assert self._departure is not None
        if self._departure.polite:
            self._departure.asked.set()
        else:
            self.cancel()

    @asynccontextmanager
    async def _departs(self) -> AsyncIterator[Departure]:
        self._departure = Departure(asyncio.Event())
        yield self._departure

    def _observe(self, event: events.Event) -> None:
        if isinstance(event, events.StateChanged):
            self.state = event.state
            if event.state is PeerState.FINISHED:
                self.run_is_over = True
                self.has_finished.set()
            self._changed()

    def _note_end(self) -> None:
        self.has_finished.set()
        self._changed()


def at_exit(leave: Callable[[], None]) -> None:
    """Call a method at the end of a program that did not leave, or that failed, while a polite end has its threads.

    What has the method, and so a module, is not kept in memory for it.
    """
    weak = WeakMethod(leave)

    def leave_if_there() -> None:
        if (method := weak()) is not None:
            method()

    threading._register_atexit(leave_if_there)  # type: ignore[attr-defined] # `atexit` comes after the threads are gone


class Leaves:
    """What lets a node leave: at a call, at the end of a context, and at the end of the program."""

    _node: NodeThread
    _has_left = False

    def leave(self) -> None:
        """Leave the run politely: save the weights in the home, and tell the others. A second call does nothing."""
        self._node.check_process()
        if not self._has_left:
            self._end()
            self._node.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.leave()
        else:  # what the program raised says more than what its node does
            self._end()

    def _end(self) -> None:
        """Ask the node to leave, and wait until it has ended."""
        self._has_left = True
        if self._node.is_ours and not self._node.is_over:
            self._node.ask_to_leave()
            self._await_end()

    def _await_end(self) -> None:
        self._node.wait()


class JoinedPeer(Leaves):
    """A node in this process, as `join` begins it. As a context it leaves at the end."""

    def __init__(self, node: NodeThread) -> None:
        self._node = node
        at_exit(self._end)

    @property
    def state(self) -> str:
        """What the node does, in a word or two; "starting" until it has found the run."""
        return "left" if self._node.is_over else str(self._node.state or "starting")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, at most `timeout` seconds; return whether it is.

        A node that has left does not wait: it returns False at once, unless the run was over.
        Raises `noloco_node.errors.UserError` if the node had to end: what happened, why, and what to try.
        """
        self._node.check_process()
        if not self._node.has_finished.wait(timeout):
            return False
        if self._node.is_over:
            self._node.result()
        return self._node.run_is_over  # not for a node that has left


def join(
    invite: str | PathLike[str], *, stages: Callable[[int], nn.Module] | None = None, **options: Unpack[OwnModelOptions]
) -> JoinedPeer:
    """Begin a node in this process: it takes a stage of the run and trains, like `noloco-node join`.

    `invite`: the line of a bootstrap peer, a file that holds it, or the home of a node. `stages`: for a run that `init`
    wrote of a list of modules: returns the module of the stage with a number; it is called in a thread of the node. The
    node works in threads of its own. Raises `noloco_node.errors.UserError` for options that cannot be used.
    """
    found, read = parsed(invite, options)
    prepare = None
    if stages is not None:
        from noloco_node.api.program_stages import prepared  # which loads torch

        prepare = partial(prepared, stages)
    return JoinedPeer(NodeThread(found, read, prepare))
