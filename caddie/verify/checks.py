"""Checks of an artifact's file against its own manifest."""

from __future__ import annotations

from dataclasses import dataclass

from caddie.pack.artifact import Artifact


@dataclass(frozen=True)
class Check:
    """Result of one check, with its evidence."""

    name: str
    passed: bool
    evidence: str


def file_checks(artifact: Artifact, cap_bytes: int) -> list[Check]:
    """Return the checks of an artifact that was read without an error, which proves checksums, shapes and hashes."""
    left = cap_bytes - artifact.file_bytes
    size = f"{artifact.file_bytes:,} of {cap_bytes:,} bytes, {abs(left):,} {'left' if left >= 0 else 'over'}"
    count = sum(parameter.numel() for parameter in artifact.model.parameters())
    stated = artifact.manifest.parameters
    return [
        Check("file is intact", True, f"every checksum holds; SHA-256 {artifact.sha256}"),
        Check("file is under the cap", left >= 0, size),
        Check("parameter count is as stated", count == stated, f"{count:,} counted, {stated:,} stated"),
    ]
