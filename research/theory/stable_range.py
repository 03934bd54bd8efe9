"""Without gradient noise: how fast the disagreement contracts, where it diverges, what deferral and solo steps do."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from noloco_node.errors import UserError
from noloco_node.run.runfile import decode_run
from research.theory.moments import MANY, Law, contraction, critical_gamma, fastest, solo_share
from research.theory.noise import POLICIES, UNMET
from research.theory.report import Report, Scale, Spread, spread
from research.theory.swarm import crossing, decay, growth

EXPECTED = {0.0: (0.545, 1.00, 0.500), 0.3: (0.553, 0.58, 0.545), 0.5: (0.700, 0.30, 0.625), 0.7: (0.891, 0.10, 0.745)}
"""By alpha: factor at gamma 0.7, the fastest gamma, its factor; worked out before this script, apart from it."""
EXPECTED_DIVERGENCE = 1.0985
EXPECTED_BY_COUNT = {2: 0.901, 4: 0.976, 8: 1.050, 16: 1.074, 64: 1.092}
"""Typical growth at alpha 0.9, gamma 0.7 by replicas, from an earlier simulation."""
DRAWN = 128
"""Replicas in the picture of the decay."""
ROUNDS_BY_COUNT = {2: 400, 4: 4000, 8: 4000, 16: 2000, 64: 400}
EXPECTED_CRITICAL = {(0.5, 0.0, "defer"): 1.50, (0.5, 0.5, "solo at once"): 1.19}
"""By alpha, chance and policy; 1.19 is from an earlier simulation, the closed form gives 1.20."""
RUN = """name = "diverges"
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
[outer]
alpha = 0.9
gamma = 0.7
"""


class Edge(NamedTuple):
    """Where the disagreement stops contracting: gamma measured and in closed form."""

    alpha: float
    unmet: float
    policy: str
    found: Spread
    expected: float


def contractions(report: Report, scale: Scale) -> None:
    """Measure the factor a round among many replicas for the settings of the design."""
    rows = []
    for alpha, (reference, quick, reference_quick) in EXPECTED.items():
        for gamma, expected in ((0.7, reference), (quick, reference_quick)):
            law = Law(alpha=alpha, gamma=gamma)
            theory = contraction(law)
            report.near(f"b. recursion at alpha {alpha:g}, gamma {gamma:g}", theory, expected, 0.002)
            cells = []
            for count in scale.crowds:
                found = _grown(replace(law, replicas=count), 40, 20, scale)
                off = report.near(f"b. {count} replicas, alpha {alpha:g}, gamma {gamma:g}", found.mean, expected, 0.015)
                cells.append(f"{found} {off}")
            rows.append([f"{alpha:g}", f"{gamma:g}", f"{expected:.3f}", f"{theory:.4f}", *cells])
        best, factor = fastest(Law(alpha=alpha))
        report.true(f"b. fastest gamma at alpha {alpha:g}: {best:g} ({factor:.4f})", abs(best - quick) <= 0.021)
        report.progress(f"b. alpha {alpha:g}; fastest by the recursion: gamma {best:g}, factor {factor:.4f}")
    report.table(
        "b. Factor a round on the variance among replicas, no inner progress; off: from what was expected.\n"
        "   Up to 200 replicas pair by the production matching, more by random permutations.",
        ("alpha", "gamma", "expected", "recursion", *(f"{count} replicas" for count in scale.crowds)),
        rows,
    )


def _grown(law: Law, rounds: int, settle: int, scale: Scale, coordinates: int = 64) -> Spread:
    return spread([growth(law, rounds, settle, seed, coordinates) for seed in range(scale.seeds)])


def divergence(report: Report, scale: Scale) -> list[tuple[int, Spread, float]]:
    """Show that alpha 0.9 with gamma 0.7 diverges among many, and that a run file with it is refused."""
    law, rows, found = Law(alpha=0.9, gamma=0.7), [], []
    for count, typical in EXPECTED_BY_COUNT.items():
        here = replace(law, replicas=count)
        measured = _grown(here, scale.rounds(ROUNDS_BY_COUNT[count]), scale.rounds(100), scale, coordinates=16)
        off = report.near(f"c. {count} replicas", measured.mean, typical, 0.01)
        found.append((count, measured, contraction(here)))
        rows.append([str(count), f"{typical:.3f}", str(measured), off, f"{contraction(here):.4f}"])
        report.progress(f"c. {count} replicas")
    for count in scale.crowds[1:]:
        here = replace(law, replicas=count)
        measured = _grown(here, scale.rounds(200), 60, scale, coordinates=16)
        off = report.near(f"c. {count} replicas", measured.mean, EXPECTED_DIVERGENCE, 0.005)
        found.append((count, measured, contraction(here)))
        rows.append([str(count), f"{EXPECTED_DIVERGENCE:g}", str(measured), off, f"{contraction(here):.4f}"])
    many = contraction(law)
    report.near("c. recursion for many", many, EXPECTED_DIVERGENCE, 0.001)
    rows.append(["many", f"{EXPECTED_DIVERGENCE:g}", "", "", f"{many:.4f}"])
    report.table(
        "c. alpha 0.9, gamma 0.7: growth a round of the variance among replicas, in a long run and of the mean square.",
        ("replicas", "expected", "long run, measured", "off", "mean square, recursion"),
        rows,
    )
    _refused(report)
    return found


def _refused(report: Report) -> None:
    try:
        decode_run(RUN, "diverges.toml")
    except UserError as trouble:
        print(
            f"\n  A run file with it is refused, exit code {trouble.code}:\n"
            f"    {trouble.what}\n    Why: {trouble.why}\n    Try: {trouble.hint}"
        )
        report.true("c. the refusal names the field", "outer.gamma" in trouble.what and "0.38" in trouble.why)
    else:
        report.true("c. a run file with alpha 0.9, gamma 0.7 is refused", False)


def decays(scale: Scale, rounds: int = 30) -> dict[float, list[Spread]]:
    """Return by alpha the course of the variance among DRAWN replicas at gamma 0.7."""
    found = {}
    for alpha in (*EXPECTED, 0.9):
        law = Law(alpha=alpha, replicas=DRAWN)
        runs = [decay(law, rounds, seed, 64) for seed in range(scale.seeds)]
        found[alpha] = [spread(values) for values in zip(*runs, strict=True)]
    return found


def edges(report: Report, scale: Scale) -> list[Edge]:
    """Find the critical gamma by bisection when pairs are not met and the unmet defer, or step alone."""
    found = []
    replicas = 512
    for alpha in scale.alphas:
        cases = [(0.0, "defer"), *((unmet, name) for unmet in UNMET for name in POLICIES)]
        for unmet, name in cases:
            law = Law(alpha=alpha, replicas=replicas, unmet=unmet, patience=POLICIES[name])
            middle = critical_gamma(law)
            rounds = scale.rounds(240)
            gammas = [crossing(law, 0.85 * middle, 1.15 * middle, rounds, seed) for seed in range(scale.seeds)]
            found.append(Edge(alpha, unmet, name, spread(gammas), critical_gamma(replace(law, replicas=MANY))))
        report.progress(f"d. critical gamma at alpha {alpha:g}")
    _tell_edges(report, found)
    return found


def _tell_edges(report: Report, found: list[Edge]) -> None:
    rows = []
    for edge in found:
        off = report.near(
            f"d. critical gamma, alpha {edge.alpha:g}, unmet {edge.unmet:g}, {edge.policy}",
            edge.found.mean,
            edge.expected,
            0.015,
        )
        reference = EXPECTED_CRITICAL.get((edge.alpha, edge.unmet, edge.policy))
        if reference is not None:
            report.near(f"d. critical gamma of the design, unmet {edge.unmet:g}", edge.found.mean, reference, 0.015)
        share = solo_share(Law(unmet=edge.unmet, patience=POLICIES[edge.policy]))
        rows.append(
            [
                f"{edge.alpha:g}",
                f"{edge.unmet:g}",
                "all meet" if edge.unmet == 0.0 else edge.policy,
                f"{100 * share:.1f} %",
                f"{reference:.2f}" if reference else "",
                str(edge.found),
                f"{edge.expected:.3f}",
                off,
            ]
        )
    report.table(
        "d. Critical gamma by bisection, 512 replicas. Closed form: 2 (1 - alpha^2) / (1 + alpha q), q the share of\n"
        "   solo steps among outer steps.",
        ("alpha", "unmet", "the unmet", "q", "expected", "measured", "closed form", "off"),
        rows,
    )
