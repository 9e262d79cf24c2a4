"""What a check-up has found: findings in sections, and whether `segue serve` could start."""

from __future__ import annotations

from typing import Literal

import msgspec

START = "start"  # the name of a finding about the start as a whole
Status = Literal["ok", "missing", "failed"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fact about this installation, and what to do about it if it is not as it should be."""

    name: str
    value: str
    status: Status = "ok"  # "missing": only some options need it; "failed": `segue serve` cannot start so
    why: str = ""  # the value is what it is
    remedy: str = ""  # for what is missing or has failed: a command, or what to change


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about one subject."""

    title: str
    findings: list[Finding]


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one run of `segue doctor`."""

    can_serve: bool
    sections: list[Section]

    @classmethod
    def of(cls, sections: list[Section]) -> Checkup:
        """Return the check-up with these sections: the engine can serve unless a finding has failed."""
        failed = any(finding.status == "failed" for section in sections for finding in section.findings)
        return cls(can_serve=not failed, sections=sections)

    @property
    def failures(self) -> list[Finding]:
        """Why `segue serve` cannot start."""
        return [each for section in self.sections for each in section.findings if each.status == "failed"]
