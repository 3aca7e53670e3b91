"""Settings as frozen values, diffs between them, schedules."""

from caddie.config.assignment import assignments, parse_assignment
from caddie.config.config import (
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
    field_types,
    paths,
    plain,
    show,
    variants,
)
