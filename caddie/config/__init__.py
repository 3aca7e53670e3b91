"""Settings as frozen values, diffs between them, schedules."""

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
    assignments,
    coerce,
    field_types,
    known,
    parse_assignment,
    paths,
    plain,
    show,
    variants,
)
