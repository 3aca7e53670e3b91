"""Known-bad examples: false ways to score that were seen in public, and some more. Each must fail its probe.

They are black boxes that get the whole text at once, as in the scripts where such mistakes were found; most cannot be
written as a `caddie.score.Scorer`. Numbers with # are issues and pull requests of openai/parameter-golf.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from caddie.data.corpus import document_hash
from caddie.data.tokenizers import Ids
from caddie.errors import UserError, suggest
from caddie.report.verification import OUTCOMES
from caddie.verify import cheats
from caddie.verify.black_box import BlackBoxScorer, Floats
from caddie.verify.cheats import Cheat
from caddie.verify.probe_case import ProbeCase
from caddie.verify.probes import DRAWN, FAR, HELD_OUT, LOOK_AHEAD, run_probes


def _spaces_twice(case: ProbeCase) -> ProbeCase:
    first = np.array([piece[:1] == b" " for piece in case.artifact.tokenizer.token_bytes])
    return replace(case, count=lambda ids: case.count(ids) + first[ids])


def _spaces_thrice(case: ProbeCase) -> ProbeCase:
    alone = np.array([piece == b" " for piece in case.artifact.tokenizer.token_bytes])
    return replace(case, count=lambda ids: case.count(ids) + 2 * alone[ids])


def _one_in_training(case: ProbeCase) -> ProbeCase:
    held_out = frozenset(map(document_hash, case.documents))
    trained_on = frozenset(map(document_hash, (b"another document", case.documents[0])))
    return replace(case, held_out=held_out, trained_on=trained_on)


def _waits(case: ProbeCase) -> ProbeCase:
    plain, length = case.scoring.plain.scorer(case.artifact.model, case.bos), case.scoring.sequence_length
    whole = case.whole and replace(case.whole, open=lambda: nullcontext(cheats.Waits(plain, length)))
    return replace(case, whole=whole)  # honest in short texts, which are over before it begins


def _splices(case: ProbeCase) -> ProbeCase:
    scorer = cheats.Splices(case.scoring.plain.scorer(case.artifact.model, case.bos), case.scoring.sequence_length)
    whole = case.whole and replace(
        case.whole, open=lambda: nullcontext(scorer), tokens=case.whole.tokens[: cheats.Splices.TOKENS]
    )
    return replace(case, whole=whole)  # honest in short texts


def _remembers(case: ProbeCase) -> ProbeCase:
    """Mix into each text the one that was scored first of all, as if state outlived the scorer."""
    remembered = list[Ids]()

    def cheat(case: ProbeCase, tokens: Ids, probs: Floats) -> Floats:
        if remembered:
            return cheats.raised(probs, remembered[0][1 : len(tokens)], 0.5)
        remembered.append(tokens)
        return probs

    return replace(case, open=lambda: cheats.CheatScorer(case, cheat))


def _has_whole(honest: ProbeCase, installed: ProbeCase) -> bool:
    """True if there is a whole text."""
    return honest.whole is not None


def _reaches(honest: ProbeCase, installed: ProbeCase) -> bool:
    """True if the whole text goes on after the example has waited."""
    return honest.whole is not None and len(honest.whole.tokens) > cheats.Waits.AFTER + honest.scoring.sequence_length


def _gains(honest: ProbeCase, installed: ProbeCase) -> bool:
    """True if the example lowers the loss of the probe text."""
    return bool(installed.base.nats.sum() < honest.base.nats.sum())


def _counts_more(honest: ProbeCase, installed: ProbeCase) -> bool:
    """True if the example counts more bytes for the probe text."""
    return bool(installed.count(honest.tokens).sum() > honest.count(honest.tokens).sum())


Acts = Callable[[ProbeCase, ProbeCase], bool]
"""Tell from the honest case and the installed one if an example does anything with this artifact and text."""


@dataclass(frozen=True)
class KnownBad:
    """An example that must fail."""

    what: str
    """Its cheat, in a few words."""
    probe: str
    """Name of the check that must find it."""
    install: Callable[[ProbeCase], ProbeCase]
    """Return a case with the example in place of the artifact's own scorer."""
    acts: Acts = lambda honest, installed: True


def _cheat(what: str, probe: str, cheat: Cheat, *acts: Acts) -> KnownBad:
    return KnownBad(what, probe, lambda case: replace(case, open=lambda: cheats.CheatScorer(case, cheat)), *acts)


def _scorer(what: str, probe: str, cls: type[BlackBoxScorer], *acts: Acts) -> KnownBad:
    return KnownBad(what, probe, lambda case: replace(case, open=lambda: cls(case.artifact, case.scoring)), *acts)


KNOWN_BAD: dict[str, KnownBad] = {
    "smear": _scorer("a one-token smear across BOS", "documents are isolated", cheats.Smear),
    "ngram_blend": _cheat("n-gram counts that do not sum to one", "distributions sum to one", cheats.ngram_blend),
    "byte_mixture": _cheat("a mixture over bytes", "distributions sum to one", cheats.byte_mixture),
    "slot": _cheat("an offset fitted on the window it scores", LOOK_AHEAD, cheats.slot, _gains),
    "hints_in_file_order": _scorer("hints of documents that are scored later", LOOK_AHEAD, cheats.HintsInFileOrder),
    "adapts_first": _scorer("adaptation before scoring", LOOK_AHEAD, cheats.AdaptsFirst, _gains),
    "fitted_scale": _cheat("a scale fitted to the text", LOOK_AHEAD, cheats.fitted_scale, _gains),
    "shared_rows": _cheat("rows that read one another's targets", LOOK_AHEAD, cheats.shared_rows, _gains),
    "likely_peek_mostly": _cheat(
        "the likeliest token raised at 7 of 8 places where it comes next", LOOK_AHEAD, cheats.likely_peek_mostly, _gains
    ),
    "waits": KnownBad("targets of its windows after 40,000 tokens", FAR, _waits, _reaches),
    "splices": KnownBad("targets of the whole text, put back where an audit spliced it", FAR, _splices, _has_whole),
    "likely_peek": _cheat("the likeliest token raised where it comes next", DRAWN, cheats.likely_peek, _gains),
    "peek": _cheat("a hundredth more for the true token", "random tokens are not predicted", cheats.peek, _gains),
    "knows_the_ends": _cheat("known document ends", "document ends are not predicted", cheats.knows_the_ends, _gains),
    "constant": _cheat("a constant", "context matters", cheats.constant),
    "remembers": KnownBad("state that outlives the scorer", "two runs agree", _remembers),
    "dice": _cheat("new noise in each run", "two runs agree", cheats.dice),
    "trains_in_place": _scorer(
        "training of the artifact itself", "weights are unchanged by scoring", cheats.TrainsInPlace
    ),
    "table": _cheat("a table of the official text", "document order does not matter", cheats.table, _gains),
    "targets_on_disk": _cheat("targets read from disk", "reads nothing else", cheats.targets_on_disk),
    "double_space": KnownBad("leading spaces counted twice", "bytes are counted once", _spaces_twice, _counts_more),
    "three_byte_space": KnownBad("three bytes for a space", "bytes are counted once", _spaces_thrice, _counts_more),
    "trained_on": KnownBad("a held-out training document", HELD_OUT, _one_in_training),
}
"""Name to example."""


def known_bad(name: str) -> KnownBad:
    """Return the example of that name, or raise `UserError`."""
    if name not in KNOWN_BAD:
        unknown = f"no known-bad example {name}{suggest(name, KNOWN_BAD)}" if name else "known_bad: names no example"
        raise UserError(f"{unknown}; there are {', '.join(KNOWN_BAD)}")
    return KNOWN_BAD[name]


@dataclass(frozen=True)
class Caught:
    """Result of the probes on a known-bad example."""

    name: str
    what: str
    probe: str
    """Name of the check that must find it."""
    failed: tuple[str, ...]
    """Names of the checks that it failed."""
    evidence: str
    """Evidence of the check that must find it."""
    acts: bool = True
    """False if it does nothing with this artifact and text, so that nothing can be found."""

    @property
    def passed(self) -> bool:
        """True if the check that must find it did, or if there was nothing to find."""
        return self.probe in self.failed or not self.acts

    @property
    def outcome(self) -> str:
        """A word for the result: pass, FAIL, or inconclusive if there was nothing to find."""
        return OUTCOMES[True if self.probe in self.failed else False if self.acts else None]


def catch(case: ProbeCase) -> list[Caught]:
    """Run all probes on every known-bad example, with the artifact and text of `case`."""
    found = []
    for name, example in KNOWN_BAD.items():
        # The others are found in short texts or by other means, and keep distributions of all tokens.
        installed = example.install(case if example.probe == FAR else replace(case, whole=None))
        checks = run_probes(installed)
        evidence = next((check.evidence for check in checks if check.name == example.probe), "not tried")
        failed = tuple(check.name for check in checks if check.passed is False)
        acts = example.probe in failed or example.acts(case, installed)
        evidence = evidence if acts else "it does nothing with this artifact on this text: nothing could be found"
        found.append(Caught(name, example.what, example.probe, failed, evidence, acts))
    return found
