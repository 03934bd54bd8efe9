"""Views for tests of the page: a swarm of any size, and one whose peers say what they like."""

from collections.abc import Callable

import msgspec

from noloco_node.observe.swarm_view import PeerView, Route, RunTotals, SwarmObserver, SwarmView

BEGUN = 1.7e9
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e<script>alert(2)</script>"


def view_of(peers: int, stages: int, moment: int = 0, name: str = "a swarm", words: str = "") -> SwarmView:
    """A swarm in which each peer passes microbatches on to three others, and has met its neighbour."""

    def peer(number: int) -> str:
        return f"12D3KooW{number % (peers or 1):08d}"

    there = [
        PeerView(
            peer=peer(number),
            name=f"{number:08d} {words}".rstrip(),
            stage=number % stages,
            state=words or "training",
            inner_steps=10 + moment,
            round=moment,
            tokens_per_s=100.0 + number,
            busy=0.5,
            loss=3.0 - 0.01 * moment,
            gap=0.01,
            waits=words or None,
            since=BEGUN - 5.0 if words else None,
            met=peer(number + stages),
            tokens=1000 * (number + 1),
            tokens_claimed=1000 * (number + 1) if number % stages == 0 else None,
            tokens_signed=900 * (number + 1) if number % stages == 0 else None,
            there_s=3600.0,
            line_bytes=10**9,
            joules=7.2e5,
            sent_per_s=1e5,
            received_per_s=2e5,
            budget=words or None,
        )
        for number in range(peers)
    ]
    routes = tuple(
        Route(origin=peer(number), target=peer(number + 1 + stages * more), per_s=0.5 + more)
        for number in range(peers)
        for more in range(3)
        if number % stages < stages - 1
    )
    totals = RunTotals(
        name=name,
        progress=min(1.0, 0.001 * moment),
        tokens=1000 * moment,
        budget_tokens=10**6,
        tokens_per_s=500.0,
        trouble=words or None,
    )
    observer = SwarmObserver()
    observer.tell(words or "00000001", words or f"came at moment {moment}", BEGUN + moment)
    return observer.put_together(totals, stages, there, BEGUN + moment, routes)


def with_course(view: SwarmView, moments: int, make: Callable[[int], SwarmView]) -> SwarmView:
    course = tuple(make(number).course[0] for number in range(moments))
    return msgspec.structs.replace(view, course=course)
