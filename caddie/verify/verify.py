"""Check an artifact's file, and probe its scorer in a sandbox."""

import contextlib
import json
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from caddie.config import Count, coerce
from caddie.data.corpus import Corpus
from caddie.errors import UserError, check_kind
from caddie.files import absolute, file_sha256
from caddie.inference.text_codec import measure
from caddie.pack.artifact import AS_ARTIFACT, Artifact, load
from caddie.report.verification import passed
from caddie.runtime.autotune import quickest, thread_counts
from caddie.runtime.progress import SILENT, JsonLines, Progress, json_line, relay
from caddie.score import Scoring, check_windows
from caddie.verify.held_out import check_held_out, held_out_documents
from caddie.verify.known_bad import Caught, catch, known_bad
from caddie.verify.probe_case import LEAST_WHOLE, Effort, probe_case_of, sized_case, with_whole_text
from caddie.verify.probe_text import SHORT, excerpts, in_order_from, library, long_enough
from caddie.verify.probes import PROBES, Check, missing_probes, probe_event, run_probes
from caddie.verify.remote_scorer import scorer_server
from caddie.verify.sandbox import NoSandbox, run_in_sandbox

MEMORY_BYTES, SECONDS = 8 << 30, 600.0
"""Limits of the sandbox."""
_PIECES, _PIECE_BYTES = 10, 4000
_EXCESS, _STREAM_BYTES = 0.005, 12
"""Bytes by which a compressed text may exceed its score: a share of the score, and a constant for each stream."""
_SELF_TEST = Effort(places=32, found=0.0, seconds=5.0)
"""Effort for the known-bad examples, whose leaks are not rare."""
_OWN = Effort(seconds=8.0)
"""Effort for caddie's own scoring, where a leak is a bug, not a cheat; a longer search would delay most runs."""
_COMMAND = "from caddie.verify.verify import main; main()"
_KNOWN_BAD = "known_bad:"
_LINES = {json_line("step", probe_event(name)) for name in PROBES}
"""Lines that the sandboxed process writes to standard error, one before each probe."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of verification."""

    checks: tuple[Check, ...]
    caught: tuple[Caught, ...] = ()
    """Results of the known-bad examples, if they were tried."""
    not_run: str | None = None
    """Why the sandbox could not run the probes, which says nothing about the artifact; None if they ran."""

    @property
    def passed(self) -> bool | None:
        """False if a check failed or a known-bad example was not caught; None if not all decided, or none could run."""
        outcomes = [check.passed for check in self.checks] + [example.passed for example in self.caught]
        return passed([*outcomes, None] if self.not_run else outcomes)


def verify(
    artifact: Artifact,
    cap_bytes: int,
    *,
    scoring: Scoring | None = None,
    scorer: str | None = None,
    corpus: Corpus | None = None,
    examples: bool = False,
    lossless: bool = False,
    audit_seconds: float | None = None,
    progress: Progress = SILENT,
) -> Verdict:
    """Check an artifact that was read without an error, and probe its scorer in a sandbox.

    `scoring` replaces the artifact's own. `scorer` is a user's, FILE.py:NAME, or a known-bad one, known_bad:NAME. The
    probe text comes from the held-out documents of `corpus`, which are then checked not to be training documents.
    Without a corpus, or if they are too short, it comes from Python's library. `examples` probes every known-bad
    example too; `lossless` compresses and decompresses some documents. Each search for leaks in a user's scorer takes
    `audit_seconds`. Raises `UserError` for wrong arguments.
    """
    check_kind(artifact, Artifact, "the artifact", AS_ARTIFACT)
    cap_bytes = coerce(cap_bytes, Count, "cap_bytes")
    chosen, users = scoring or artifact.scoring, bool(scorer and not scorer.startswith(_KNOWN_BAD))
    check_windows(chosen.sequence_length, chosen.stride)
    if lossless and scorer:
        raise UserError("--lossless compresses with the scoring of the artifact or of score.*; leave out --scorer")
    if audit_seconds and not users:
        raise UserError("--audit-seconds is for a scorer of your own: --scorer FILE.py:NAME")
    if scorer and not users:
        known_bad(scorer.removeprefix(_KNOWN_BAD))
    checks = file_checks(artifact, cap_bytes)
    if corpus is None:
        documents = library()
    else:
        progress.step({"event": "doing", "text": "checking the held-out text"})
        corpus.check_counts()
        documents = held_out_documents(corpus)
        checks += check_held_out(artifact.tokenizer, corpus, documents, progress)
    progress.step({"event": "doing", "text": "starting the probes"})
    seed = secrets.randbits(32)  # so that no scorer can know the random tokens
    too_short = not long_enough(artifact.tokenizer, excerpts(documents, chosen, seed))
    sources = library() if too_short else documents
    job = {
        "artifact": str(absolute(artifact.path)),
        "parts": [str(absolute(file.path)) for file in artifact.parts],
        "score": chosen.to_json(),
        "scorer": str(absolute(Path(scorer))) if scorer and users else scorer,
        "documents": [piece.decode("latin-1") for piece in excerpts(sources, chosen, seed)],
        "in_order": [document.decode("latin-1") for document in in_order_from(sources, seed)],
        "seed": seed,
        "examples": examples,
        "audit_seconds": audit_seconds,
        "lossless": [piece.decode("latin-1") for piece in _sample(documents, seed)] if lossless else [],
    }
    try:
        if users:
            probed, caught = _probe_user_scorer(artifact, job, progress)
        else:
            probed, caught = _probe_in_sandbox(artifact, job, too_short, progress)
    except NoSandbox as error:
        return Verdict(checks=tuple(checks), not_run=str(error))
    return Verdict(checks=(*checks, *probed), caught=tuple(caught))


def file_checks(artifact: Artifact, cap_bytes: int) -> list[Check]:
    """Return the checks of an artifact's file. Reading it without an error has proved checksums, shapes and hashes."""
    left = cap_bytes - artifact.file_bytes
    size = f"{artifact.file_bytes:,} of {cap_bytes:,} bytes, {abs(left):,} {'left' if left >= 0 else 'over'}"
    count, stated = sum(one.numel() for one in artifact.model.parameters()), artifact.manifest.parameters
    return [
        Check("file is intact", True, f"every checksum holds; SHA-256 {artifact.sha256}"),
        Check("file is under the cap", left >= 0, size),
        Check("parameter count is as stated", count == stated, f"{count:,} counted, {stated:,} stated"),
    ]


def _probe_in_sandbox(
    artifact: Artifact, job: dict[str, Any], too_short: bool, progress: Progress
) -> tuple[list[Check], list[Caught]]:
    begin = time.perf_counter()
    outcome = run_in_sandbox(
        _COMMAND,
        readable=[Path(job["artifact"]), *map(Path, job["parts"])],
        stdin=json.dumps(job).encode(),
        memory_bytes=MEMORY_BYTES,
        seconds=SECONDS,
        watch=_Probing(progress).read,
    )
    probed: list[Check] = []
    caught: list[Caught] = []
    trouble = outcome.stopped
    if not trouble:
        try:
            probed, caught = _read_answer(outcome.stdout)
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            last = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["without an error message"]
            trouble = f"it ended with status {outcome.returncode}: {last[0]}"
            trouble = trouble if outcome.returncode or not outcome.stdout else "its answer cannot be read"
            if not outcome.stdout and last[0].startswith(("ImportError", "ModuleNotFoundError")):
                raise NoSandbox(f"{last[0]} ({outcome.isolation})") from None
    if not trouble and file_sha256(artifact.path) != artifact.sha256:
        trouble = "the artifact file has changed"
    if not trouble and (missing := missing_probes(probed)):
        trouble = f"{len(missing)} probes gave no result, such as: {missing[0]}"
    memory = f"{outcome.peak_bytes >> 20:,} of {MEMORY_BYTES >> 20:,} MiB"
    used = f"{memory}, {time.perf_counter() - begin:.0f} of {SECONDS:.0f} seconds; random seed {job['seed']}"
    if too_short:
        used += "; the held-out text is too short to be probed with, Python's library took its place"
    used += _warning(artifact)
    sandbox = Check("runs in a sandbox", not trouble, f"{outcome.isolation}; {trouble or used}")
    return [sandbox, *probed], caught


def _read_answer(text: bytes) -> tuple[list[Check], list[Caught]]:
    """Return what the sandboxed process found.

    Raises `UserError` if it reports an error; `ValueError`, `TypeError` or `KeyError` for a malformed answer.
    """
    answer = dict(json.loads(text))
    if "error" in answer:
        raise UserError(str(answer["error"]))
    checks = [Check(str(one["name"]), one["passed"], str(one["evidence"])) for one in answer.get("checks", [])]
    if any(one.passed not in (True, False, None) for one in checks):
        raise TypeError("a check without a result")
    return checks, [Caught(**{**one, "failed": (*map(str, one["failed"]),)}) for one in answer.get("caught", [])]


class _Probing:
    """Shows which probe runs. It shows nothing else that the sandboxed process writes."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.shown = progress, ""

    def read(self, stderr: bytes) -> None:
        """Show the probe that began last, once."""
        lines = reversed(stderr[-4096:].decode(errors="replace").splitlines())
        begun = next((line for line in lines if line in _LINES), self.shown)
        if begun != self.shown:
            self.shown = begun
            relay(begun, self.progress)


def _probe_user_scorer(artifact: Artifact, job: dict[str, Any], progress: Progress) -> tuple[list[Check], list[Caught]]:
    """Run the probes in this process, which runs none of the scorer's code: the sandbox holds the scorer alone."""
    begin, threads = time.perf_counter(), torch.get_num_threads()
    try:
        checks, caught = _run_job(job, progress)
    finally:
        torch.set_num_threads(threads)
    isolation = scorer_server(artifact).sandboxed.isolation
    used = f"{time.perf_counter() - begin:.0f} seconds; random seed {job['seed']}{_warning(artifact)}"
    sandbox = Check("runs in a sandbox", True, f"the scorer alone, with {isolation}; {used}")
    return [sandbox, *checks], caught


def _warning(artifact: Artifact) -> str:
    """Return a warning if an artifact has parts, whose code runs in the process of the probes."""
    names = " and ".join(f"{file.path.name} (SHA-256 {file.stated.sha256})" for file in artifact.parts)
    return f"; {names} ran in the process of the probes and could change their results; read it" if names else ""


def _sample(documents: Sequence[bytes], seed: int) -> list[bytes]:
    starts = [(document, start) for document in documents for start in range(0, len(document), _PIECE_BYTES)]
    drawn = random.Random(seed).sample(starts, min(_PIECES, len(starts)))
    return [document[start : start + _PIECE_BYTES] for document, start in drawn]


def _compresses(artifact: Artifact, scoring: Scoring, documents: Sequence[bytes]) -> Check:
    """Compress documents and decompress them: the size must match their score."""
    torch.set_num_threads(1)  # a second thread does not help with one token at a time
    found = measure(artifact, documents, scoring=scoring)
    allowed = found.predicted_bytes * (1 + _EXCESS) + found.streams * _STREAM_BYTES + found.head_bytes
    source, off = found.source_bytes, found.compressed_bytes / found.predicted_bytes - 1
    evidence = (
        f"{source:,} bytes became {found.compressed_bytes:,} in {found.streams} streams and came back; "
        f"their score predicts {found.predicted_bytes:,.0f} "
        f"({8 * found.predicted_bytes / source:.4f} bits per byte), {off:+.2%} off; "
        f"{found.compress_seconds:.0f} and {found.decompress_seconds:.0f} seconds"
    )
    if found.predicted_bytes_own_ids != found.predicted_bytes:
        claimed = 8 * found.predicted_bytes_own_ids / source
        evidence += f"; lossy tokenizer: the score of the text that it decodes to is {claimed:.4f}"
    if stored := not found.streams and found.predicted_bytes_own_ids < found.compressed_bytes:
        evidence += "; the text was stored without compression"
    return Check("compresses to its score", found.compressed_bytes <= allowed and not stored, evidence)


def main() -> None:
    """Run in the sandbox: read a job from standard input and print its result, both as JSON."""
    job = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a user's scorer may print
            checks, caught = _run_job(job, JsonLines(sys.stderr))
        answer: dict[str, Any] = {"checks": [*map(asdict, checks)], "caught": [*map(asdict, caught)]}
    except UserError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _run_job(job: dict[str, Any], progress: Progress = SILENT) -> tuple[list[Check], list[Caught]]:
    artifact = load(job["artifact"], parts=job["parts"])
    scoring = Scoring.from_json(job["score"])
    documents, in_order = ([text.encode("latin-1") for text in job[name]] for name in ("documents", "in_order"))
    least = max(SHORT, 3 * scoring.sequence_length)
    short = probe_case_of(artifact, scoring.plain, documents, seed=job["seed"], length=least)

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        short.open().score(short.tokens, short.positions)

    torch.set_num_threads(quickest(thread_counts(), work))
    scorer = job["scorer"]
    if job["examples"] or (scorer and scorer.startswith(_KNOWN_BAD)):
        plain = short.scoring.scorer(artifact.model, short.bos)
        short = with_whole_text(short, short.scoring, in_order, 0.0, lambda: contextlib.nullcontext(plain), LEAST_WHOLE)
    if scorer and scorer.startswith(_KNOWN_BAD):
        case = known_bad(scorer.removeprefix(_KNOWN_BAD)).install(short)
    else:
        case = sized_case(artifact, scoring, documents, seed=job["seed"], scorer=scorer, in_order=in_order)
    if job["audit_seconds"]:
        case = replace(case, effort=Effort(seconds=job["audit_seconds"]))
    elif not scorer and not job["parts"]:
        case = replace(case, effort=_OWN)
    checks = run_probes(case, progress)
    caught = catch(replace(short, effort=_SELF_TEST)) if job["examples"] else []
    if job["lossless"]:  # last, as it leaves one thread
        checks.append(_compresses(artifact, scoring, [document.encode("latin-1") for document in job["lossless"]]))
    return checks, caught
