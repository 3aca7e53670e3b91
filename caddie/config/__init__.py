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
    Technique,
    coerce,
    field_types,
    known,
    paths,
    plain,
    show,
    variants,
)
