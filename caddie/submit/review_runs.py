"""Checks of a folder's logs against the claims of its JSON, and against one another."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations, pairwise
from statistics import fmean, pstdev, stdev

from caddie.errors import count
from caddie.lab.stats import welch
from caddie.run.policy import overrun_seconds
from caddie.submit.logs import Log, Score, decimals
from caddie.submit.review_claims import Claims
from caddie.submit.review_logs import CAP, EVALUATION_S, TRAINING_MS, check_scoring, check_training, training_clock
from caddie.submit.review_rules import Findings

_SEEDS = 3
_SEQUENCE = 2_048
"""Tokens by which counts of one set may differ, as scripts cut it to whole sequences."""
_ONE_TEXT = 0.03
"""Nats by which the difference of two runs' training losses may vary from one logged step to the next, if both read one
text in one order. Merged records then vary by at most 0.018; with other texts or another order, by 0.034 and more."""
_SETTLED, _SHARED = 1_000, 4
"""First step that is compared, and the least number of steps."""
_SHOWN = Decimal("0.00005")
"""Half of the last digit that the contest's table shows."""
_EXACT = 7
"""Digits after the point in which no two seeds of a merged record agree."""
_LEAST_DIGITS = 4
"""Fewest digits after the point to which scores are compared: JSON drops last zeros, so 1.1 stands for 1.1000."""
_READING = ("train_batch_tokens", "train_seq_len", "tokenizer_path")
"""Settings that say what a step reads."""
_UNLIKE = ("seed", "run_id", "rank", "local_rank", "is_main_process", "logfile", "val_loss_every", "train_log_every")
_UNLIKE_PARTS = re.compile(r"(?:path|dir|file|name)s?(?:_|$)")
"""Settings, and ends of words in their names, that may differ between seeds."""


def agree(a: Decimal, b: Decimal, least: int = _LEAST_DIGITS) -> bool:
    """True if two decimals agree to the digits of the one with fewer, but to at least `least` after the point."""
    return abs(a - b) <= Decimal(1).scaleb(-max(least, min(decimals(a), decimals(b)))) / 2


@dataclass(frozen=True)
class Stated:
    """Runs of a folder as its files state them."""

    claims: Claims
    logs: list[Log]
    chosen: list[Log]
    """Those that the score of the JSON comes from."""
    unread: bool
    """True if the folder has logs that were not read."""


def cited(logs: Sequence[Log], claims: Claims) -> list[Log]:
    """Return the logs that the score of the JSON comes from: those of its seeds with their scores, where there are any.

    Folders also hold earlier, repeated and rejected runs; what is wrong with those is only worth a note.
    """
    chosen: list[Log] = []
    for seed in claims.seeds:
        own = [log for log in logs if seed in (log.seed, log.stated_seed)]
        stated = claims.scores.get(seed)
        same = [log for log in own if stated is not None and any(agree(one.bits, stated) for one in log.scores)]
        chosen += same or own
    runs = {(log.seed, log.final[-1].bits) for log in logs if log.final}
    if not claims.seeds and claims.score is not None and len({seed for seed, _ in runs}) < len(runs):
        chosen = [log for log in logs if any(agree(score.bits, claims.score) for score in log.final)]
    return list({id(log): log for log in chosen}.values()) or [log for log in logs if log.scores] or list(logs)


def headline(log: Log, claims: Claims) -> Score | None:
    """Return the scoring line that the JSON cites, else the log's last."""
    seeds = [seed for seed in (log.seed, log.stated_seed) if seed is not None]
    for stated in (*(claims.scores.get(seed) for seed in seeds), claims.score):
        for score in reversed(log.scores):
            if stated is not None and agree(score.bits, stated):
                return score
    return log.final[-1] if log.final else None


def check_runs(stated: Stated, base: Stated | None, script_bytes: int, found: Findings) -> None:
    """Check a folder's logs and the claims of its JSON; `base` is of the folder to beat."""
    for log in stated.logs:
        _check_log(log, stated, script_bytes, found)
    _check_agreement(stated, found)
    _check_configuration(stated, found)
    _check_training_text(stated, base.logs if base else [], found)
    scores = [float(score) for score in _seed_scores(stated)]
    theirs = [float(score) for score in _seed_scores(base)] if base else stated.claims.base
    _check_p_value(scores, theirs, stated.claims, found, asked=base is not None)


def _check_log(log: Log, stated: Stated, script_bytes: int, found: Findings) -> None:
    """Check one log: bytes, clocks, validation set, and how it scored.

    Findings in a log that the score does not come from become notes, except those of its training if the score comes
    from an evaluation-only log of its seed.
    """
    chosen = log in stated.chosen
    alone = [one for one in stated.chosen if one.value(training_clock(one)) is None and one.seed == log.seed]
    scoring = check_scoring(log, headline(log, stated.claims), stated.claims.own_set)
    for told, counts in ((check_training(log, script_bytes), chosen or alone), (scoring, chosen)):
        for rule, said, line in told:
            found.add(rule, log.file, said if counts else f"not a log of the score: {said}", line, note=not counts)


def _check_agreement(stated: Stated, found: Findings) -> None:
    """Check that JSON and logs agree: scores of the seeds, their mean, standard deviation, number and sizes."""
    claims, logs = stated.claims, stated.logs
    seeds = len(claims.seeds or {log.seed for log in stated.chosen})
    if stated.chosen and seeds < _SEEDS:
        found.add("seeds", claims.file, f"{seeds} of {_SEEDS} seeds")
    for seed in claims.seeds:
        own = [log for log in logs if seed in (log.seed, log.stated_seed)]
        if (tokens := claims.tokens.get(seed)) is not None:
            _check_tokens(seed, tokens, own, found)
        if not own:
            said = f"no log that was read is of seed {seed}" if stated.unread else f"there is no log of seed {seed}"
            found.add("seed-log", claims.file, said, note=stated.unread)
        elif (score := claims.scores.get(seed)) is not None:
            _check_seed(seed, score, own, found)
        elif claims.scores and (scored := next((log for log in own if log.final), None)):
            end = scored.final[-1]
            said = f"seed {seed} ends with {end.bits}, and the JSON lists the seed without its score: add it"
            found.add("score-left-out", scored.file, said, end.line)
    _check_copies(stated, found)
    for log in logs:
        if log.stated_seed not in (None, log.seed):
            said = f"it states seed {log.stated_seed}, and its name says {log.seed}"
            found.add("seed-name", log.file, said, log.line("seed"))
    _check_mean(stated, found)
    _check_sizes(stated, found)
    _check_limits(claims, found)


def _check_copies(stated: Stated, found: Findings) -> None:
    """Check that no log is a copy of another seed's: to the digit, two seeds share few losses and no score."""
    scores = {log.file: headline(log, stated.claims) for log in stated.chosen}
    for a, b in combinations(stated.chosen, 2):
        if a.seed == b.seed:
            continue
        shared = [step for step in a.losses if step in b.losses and step > 1]
        same = [step for step in shared if a.losses[step] == b.losses[step]]
        one, other = scores[a.file], scores[b.file]
        if len(same) >= _SHARED and len(same) > len(shared) / 2:
            said = f"{len(same)} of its {len(shared)} training losses are"
        elif one and other and one.bits == other.bits and decimals(one.bits) >= _EXACT:
            said = f"the digits of its score {one.bits} are"
        else:
            continue
        found.add("seed-copy", b.file, f"{said} those of seed {a.seed} in {a.file}: one run counts once")


def _check_sizes(stated: Stated, found: Findings) -> None:
    """Check that each seed's log states a size, and that none below it is claimed."""
    for seed in {log.seed: None for log in stated.logs}:
        own = [log for log in stated.logs if log.seed == seed]
        totals = [total for log in own if (total := log.value("total_bytes")) is not None]
        claimed = stated.claims.sizes.get(seed) if seed is not None else None
        if not totals:
            found.add("size-unknown", own[0].file, "no line states the total size")
        elif claimed is not None and claimed < min(totals):
            models = {log.value("model_bytes") for log in own}
            what = "the model alone" if claimed in models else "neither its total nor its model"
            said = f"seed {seed}: {claimed:,} bytes; its log has {min(totals):,.0f}, and it is {what}"
            found.add("size-claim", stated.claims.file, said)


def _check_limits(claims: Claims, found: Findings) -> None:
    """Check the JSON's own seconds and bytes against the limits."""
    for what, rule, value in claims.limited:
        limit = int({"training-clock": TRAINING_MS / 1_000, "evaluation-clock": EVALUATION_S, "size-cap": CAP}[rule])
        if value > limit:
            unit = "bytes" if rule == "size-cap" else "s"
            if rule == "training-clock" and float(value) - limit <= overrun_seconds(0.0):
                rule = "training-step"
            found.add(rule, claims.file, f"{what} says {value:,.10g} {unit} of {limit:,}")


def _check_seed(seed: int, stated: Decimal, own: Sequence[Log], found: Findings) -> None:
    """Check the score of a seed against its logs: the last scoring line, or at least one of them."""
    if any(log.final and agree(log.final[-1].bits, stated) for log in own):
        return
    for log in own:
        for score in log.scores:
            if agree(score.bits, stated):
                last = log.final[-1] if log.final else score
                said = f"seed {seed}: {stated} is line `{score.name}`, and the last is `{last.name}` {last.bits}"
                found.add("score-last", log.file, said, score.line)
                return
    log = next((log for log in own if log.final), own[0])
    ends = f"its log ends with {log.final[-1].bits}" if log.final else "its log has no score"
    line = log.final[-1].line if log.final else None
    found.add("score", log.file, f"seed {seed}: the JSON says {stated}, and {ends}", line)


def _check_tokens(seed: int, stated: int, own: Sequence[Log], found: Findings) -> None:
    """Check that the JSON's tokens of validation are those of a log of the seed, but for a last sequence."""
    counted = [(log.file, log.facts["validation_tokens"]) for log in own if "validation_tokens" in log.facts]
    if counted and min(abs(tokens.value - stated) for _, tokens in counted) > _SEQUENCE:
        file, tokens = counted[0]
        said = f"seed {seed}: the JSON says {stated:,} tokens of validation, and its log has {tokens.value:,.0f}"
        found.add("validation-claim", file, said, tokens.line)


def _check_mean(stated: Stated, found: Findings) -> None:
    claims, file, scores = stated.claims, stated.claims.file, _seed_scores(stated)
    if claims.score is None or not scores:
        return
    mean = sum(scores, Decimal()) / len(scores)
    slack = Decimal(1).scaleb(-max(_LEAST_DIGITS, min(decimals(one) for one in (claims.score, *scores))))
    said = f"val_bpb is {claims.score}; the mean of {count(len(scores), 'seed')} is {mean:.8f}"
    if abs(mean - claims.score) > slack:
        rule = "score-mean" if abs(mean - claims.score) > _SHOWN else "score-mean-digits"
        if other := None if claims.scores else _other_line(stated.chosen, claims.score):
            rule, said = "score-last", f"val_bpb is {claims.score}, the mean of the lines `{other}`, not of the last"
        elif any(agree(score, claims.score) for score in scores):
            rule = "score-one-seed"
        found.add(rule, file, said)
    if claims.std is not None and len(scores) > 1:
        digits = max(_LEAST_DIGITS, decimals(claims.std))
        kinds = {"population": pstdev(scores), "sample": stdev(scores)}
        named = [name for name, value in kinds.items() if abs(value - claims.std) <= Decimal(1).scaleb(-digits)]
        if named:
            found.add("score-std", file, f"val_bpb_std {claims.std} is the {' or '.join(named)} standard deviation")
        else:
            said = ", ".join(f"{name} {value:.{max(digits, 5)}f}" for name, value in kinds.items())
            found.add("score-std-wrong", file, f"val_bpb_std is {claims.std}; that of the seeds is {said}")


def _seed_scores(stated: Stated) -> list[Decimal]:
    """Return a score for each seed: the JSON's, else those of the logs."""
    ends = {log.seed: score.bits for log in stated.chosen if (score := headline(log, stated.claims)) is not None}
    return list(stated.claims.scores.values()) or list(ends.values())


def _other_line(chosen: Sequence[Log], stated: Decimal) -> str | None:
    """Return the name of the scoring lines whose mean over the logs is the stated score, if there are any."""
    lasts = [{score.name: score.bits for score in log.scores} for log in chosen]
    for name in (one for one in lasts[0] if all(one in last for last in lasts)):
        if agree(sum((last[name] for last in lasts), Decimal()) / len(lasts), stated):
            return name
    return None


def _check_configuration(stated: Stated, found: Findings) -> None:
    """Check that the logs of the score have the settings of the first with any, and say which others have not."""
    first = next((log for log in stated.chosen if log.settings), None)
    if first is None:
        return
    a = _compared(first)
    for log in [*stated.chosen, *(log for log in stated.logs if log not in stated.chosen)]:
        b = _compared(log)
        if odd := [name for name in a if name in b and a[name][0] != b[name][0]]:
            shown = _some([f"{name} {a[name][0]} and {b[name][0]}" for name in odd])
            rule = "configuration" if log in stated.chosen else "seed-other"
            note = rule == "seed-other" and len(stated.claims.seeds) >= _SEEDS
            found.add(rule, log.file, f"unlike {first.file}: {shown}", b[odd[0]][1], note)
        elif a.keys() & b.keys() and log.final and stated.claims.seeds and log.seed not in (None, *stated.claims.seeds):
            said = f"seed {log.seed} of the same configuration ends with {log.final[-1].bits}; the JSON leaves it out"
            found.add("seed-left-out", log.file, said, log.final[-1].line)
        elif b and log in stated.chosen and (alone := sorted(a.keys() ^ b.keys())):
            said = f"only one of it and {first.file} prints {_some(alone)}: see whether one script wrote both"
            found.add("configuration-names", log.file, said)


def _some(parts: Sequence[str]) -> str:
    return "; ".join(parts[:4]) + (f"; and {len(parts) - 4} more" if len(parts) > 4 else "")


def _compared(log: Log) -> dict[str, tuple[str, int]]:
    """Return the settings of a log, without paths and the like."""
    kept = (name for name in log.settings if name not in _UNLIKE)
    return {name: log.settings[name] for name in kept if not _UNLIKE_PARTS.search(name)}


def _check_training_text(stated: Stated, base: Sequence[Log], found: Findings) -> None:
    """Check that training losses rise and fall with the base's where both read as many tokens a step.

    Contest scripts read the text in an order that no seed changes, so the loss of a step tells what text it was of.
    """
    seeds = {log.seed for log in stated.chosen}
    for log in (log for log in stated.logs if log.seed in seeds):
        for other in (one for one in base if _reading(one) == _reading(log) and all(_reading(log)[:2])):
            steps = [step for step in log.losses if step >= _SETTLED and step in other.losses]
            if len(steps) < _SHARED:
                continue
            apart = [log.losses[step] - other.losses[step] for step in steps]
            # One model may learn faster than another at times: only what changes from step to step is of the text.
            spread = pstdev(b - a for a, b in pairwise(apart)) / math.sqrt(2)
            if spread > _ONE_TEXT:
                shards, others = (one.value("training_shards") for one in (log, other))
                said = f"training losses of {len(steps)} steps do not go with those of the base's {other.file}: their"
                said += f" difference varies by {spread:.3f} nats; another training text, or another order of it"
                if None not in (shards, others) and shards != others:
                    said += f", as from {shards:.0f} shards and the base's {others:.0f}"
                found.add("training-text", log.file, said)
            break


def _reading(log: Log) -> list[str]:
    return [log.settings.get(name, ("", 0))[0].rpartition("/")[2] for name in _READING]


def p_value(base: Sequence[float], scores: Sequence[float]) -> float | None:
    """Return the one-sided p of Welch's test that the scores beat the base's.

    None with fewer than two scores on a side, or where nothing varies.
    """
    p = welch(base, scores).p_above(0.0) if min(len(base), len(scores)) > 1 else math.nan
    return None if math.isnan(p) else p


def _check_p_value(
    scores: Sequence[float], base: Sequence[float], claims: Claims, found: Findings, *, asked: bool
) -> None:
    """Recompute the p-value; if `asked`, note if there is none."""
    if (p := p_value(base, scores)) is None:
        said = f"seeds on either side, with scores that differ; here are {len(scores)}, and the base has {len(base)}"
        if asked:
            found.add("p-value", claims.file, f"no p-value against the base: it takes two {said}")
        return
    said = f"p = {p:.4g}, {len(scores)} seeds of mean {fmean(scores):.5f} against {len(base)} of {fmean(base):.5f}"
    found.add("p-value" if p < 0.25 else "p-value-weak", claims.file, f"{said} (Welch, one-sided)")
    if claims.p_value is not None and not p / 3 <= float(claims.p_value) <= 3 * p:
        said = f"p_value is {claims.p_value}; the seeds give {p:.4g} for any improvement, by Welch's one-sided test"
        found.add("p-value-claim", claims.file, said)
