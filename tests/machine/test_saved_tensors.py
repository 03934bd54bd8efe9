"""What autograd keeps of a pass is counted once for each storage, and no longer than autograd keeps it."""

import torch

from noloco_node.machine.memory import SavedTensors


def test_what_autograd_lets_go_in_mid_pass_counts_no_longer() -> None:
    weight, saved = torch.ones(100, requires_grad=True), SavedTensors()
    with saved:
        for _ in range(10):
            torch.sigmoid(weight * 2).argmax()
        kept = torch.sigmoid(weight * 2)
    assert kept.grad_fn is not None, "`sigmoid` keeps its result"
    assert saved.bytes == 4 * kept.numel()


def test_a_storage_that_several_nodes_keep_counts_once_and_to_the_last_of_them() -> None:
    weight, saved = torch.ones(100, requires_grad=True), SavedTensors()
    with saved:
        states = torch.sigmoid(weight)
        squares = states[:50].square()
        other = states.exp()
        del squares
        more = other.exp()
    assert saved.bytes == 4 * (states.numel() + other.numel() + more.numel())


def test_a_backward_pass_leaves_the_most_that_was_kept() -> None:
    weight, saved = torch.ones(100, requires_grad=True), SavedTensors()
    with saved:
        torch.sigmoid(weight).sum().backward()
        assert saved.bytes == 4 * weight.numel()
        torch.sigmoid(weight).sum().backward()
    assert saved.bytes == 4 * weight.numel()
    assert weight.grad is not None
