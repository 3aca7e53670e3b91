"""Settings as frozen values, diffs between them, schedules."""

from caddie.config.assignment import assignments, parse_assignment
from caddie.config.config import (
    ABSENT,
    Channels,
    Config,
    Count,
    Diff,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Seed,
    coerce,
    differences,
    field_types,
    paths,
    plain,
    show,
    variants,
)
