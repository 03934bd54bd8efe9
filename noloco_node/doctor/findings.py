"""What the doctor finds: a subject, how bad it is, what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from noloco_node.errors import Exit


class Grade(StrEnum):
    """How a finding is: fine; worth a look; in the way of joining."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `hint`: what to do about it, where there is something to do."""

    about: str
    grade: Grade
    says: str
    hint: str | None = None


def ok(about: str, says: str) -> Finding:
    """Return a finding with which all is well."""
    return Finding(about=about, grade=Grade.GOOD, says=says)


def warn(about: str, says: str, hint: str) -> Finding:
    """Return a finding that does not keep anybody from joining."""
    return Finding(about=about, grade=Grade.DOUBTFUL, says=says, hint=hint)


def fail(about: str, says: str, hint: str) -> Finding:
    """Return a finding that will prevent joining, or make it useless."""
    return Finding(about=about, grade=Grade.BAD, says=says, hint=hint)


_SIGNS = {Grade.GOOD: "ok", Grade.DOUBTFUL: "look", Grade.BAD: "BAD"}


def line(finding: Finding) -> str:
    """Return a finding as plain text, of two lines where there is something to do."""
    text = f"{_SIGNS[finding.grade]:>4}  {finding.about}: {finding.says}"
    return text + (f"\n      try: {finding.hint}" if finding.hint else "")


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line: whether this machine can join."""
    count = sum(finding.grade is Grade.BAD for finding in findings)
    if count:
        return f"{count} of {len(findings)} findings will prevent joining."
    open_ones = sum(finding.grade is Grade.DOUBTFUL for finding in findings)
    return "Nothing is in the way." + (f" {open_ones} findings are worth a look." if open_ones else "")


def exit_code(findings: Sequence[Finding]) -> Exit:
    """Return OK, or UNFIT where something will prevent joining."""
    return Exit.UNFIT if any(finding.grade is Grade.BAD for finding in findings) else Exit.OK
