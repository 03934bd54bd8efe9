"""Why a bootstrap peer cannot be reached, in words."""

from __future__ import annotations

import pytest

from noloco_node.libp2p.addresses import parse_peer_address, plain_cause

PEER = "12D3KooWNkoFmBk1MvVFopXqyA1Sppe8rVCzStqsG7uvJMpKv27U"
ADDRESS = parse_peer_address(f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("dial tcp4 192.0.2.1:4001: connect: connection refused", "no program listens there"),
        ("dial tcp4 192.0.2.1:4001: i/o timeout", "no answer"),
        ("failed to negotiate security protocol: message did not have trailing newline", "is no peer"),
        ("failed to negotiate security protocol: peer id mismatch: expected Qm, but remote key matches Qn", "Qn"),
        ("something new", "something new"),
    ],
)
def test_each_cause_reads_differently(words: str, cause: str) -> None:
    others = "  * [/ip4/192.0.2.2/tcp/4001] dial tcp4 192.0.2.2:4001: connect: network is unreachable"
    said = plain_cause(f"failed to dial {PEER}:\n{others}\n  * [/ip4/192.0.2.1/tcp/4001] {words}", ADDRESS)
    assert cause in said
    assert "no route" not in said
