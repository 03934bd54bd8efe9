"""Which window a microbatch's gradient belongs to, when two windows are in flight.

Twice as many microbatches as an inner step takes are let in, so that forward passes of the next window fill the time in
which the last of this one come back. Which window a microbatch is in shows when its gradient has come: before its
backward pass it asks for a **turn**, and between two steps there are exactly as many turns as a step takes.

- A turn is kept for each microbatch that was let in before the last step, until it has succeeded or failed; the younger
  ones share the others. So nobody sees more than one step between its forward and its backward pass, and whoever fails
  gives its turn back to its window.
- Whoever gets no turn waits, at most until the step, and then it is one of those for whom a turn is kept.
- Only a microbatch whose reply has come waits for a turn, and only for the device, for the step, or for older ones of
  this stage, which never wait for a turn themselves but only for later stages. Nothing waits for an arrival. So with
  two windows as with one places wait on later stages alone, and no circle closes.

Gradients of the two windows never meet: from the end of the last turn until the next window no backward pass runs.

To fix the window at the gate instead would need a second set of gradients, for replies overtake each other; without it
a gradient of the next window would wait for one of this window that has not even arrived, and stages could wait for
each other in a circle. With replicas of equal speed the two were equally fast in a model of their cost; with speeds of
1:1:2:4 a second set would gain up to five points of a hundred.

With one window in flight a turn is always there.
"""

from __future__ import annotations

import asyncio


class TurnClaim:
    """A microbatch's right to a turn. `step`: inner steps that had been taken when it was let in."""

    __slots__ = ("granted", "step")

    def __init__(self, step: int) -> None:
        self.step, self.granted = step, False


class GradientTurns:
    """The turns of the window that is under way, and those who wait for one."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.steps = 0
        """Windows that have ended."""
        self.deferred = 0
        """Microbatches that had to wait for their turn, since the start."""
        self._given = 0
        self._kept = 0
        """For those who were let in before the last step and have not had their turn."""
        self._waiting: dict[TurnClaim, asyncio.Future[bool]] = {}
        """The first to ask first."""
        self._ended = False

    @property
    def waiting(self) -> int:
        """Microbatches that wait for their turn now."""
        return len(self._waiting)

    def claim(self) -> TurnClaim:
        """Return the claim of a microbatch that is let in now."""
        return TurnClaim(self.steps)

    def take(self, claim: TurnClaim) -> bool:
        """Grant a claim if there is a turn for it; at once."""
        if claim.granted:
            return True
        if claim.step < self.steps:
            self._kept -= 1
        elif self._given + self._kept >= self.window:
            return False
        self._given += 1
        claim.granted = True
        return True

    async def wait(self, claim: TurnClaim) -> bool:
        """Wait until a claim is granted; False if there will be no window any more that could take it.

        Who is cancelled meanwhile may have had its claim granted in that moment; `release` looks.
        """
        if self.take(claim) or self._ended:
            return claim.granted
        self.deferred += 1
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[claim] = waiting
        try:
            return await waiting
        finally:
            del self._waiting[claim]

    def release(self, claim: TurnClaim) -> None:
        """Take back the turn, given or kept, of a microbatch that failed."""
        if claim.granted:
            self._given -= 1
        elif claim.step < self.steps:
            self._kept -= 1

    def grant(self) -> None:
        """Let those go on who wait and for whom there is a turn by now."""
        for claim, waiting in self._waiting.items():
            if not waiting.done() and self.take(claim):
                waiting.set_result(True)

    def next_window(self, in_flight: int) -> None:
        """Begin a window; a turn is kept for each that is in flight."""
        self.steps += 1
        self._given, self._kept = 0, in_flight

    def end(self) -> None:
        """Say that there will be no further window: whoever waits learns that it waits in vain."""
        self._ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(False)
