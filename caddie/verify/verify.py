"""`caddie verify`: the checks on the file, and the probes in a sealed process."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caddie.data.corpus import Corpus, file_sha256, read_hashes
from caddie.errors import UserError
from caddie.inference.text_codec import measure
from caddie.pack.artifact import Artifact, load
from caddie.runtime.autotune import quickest, thread_counts
from caddie.score import Scoring, check_windows
from caddie.verify.checks import Check, file_checks
from caddie.verify.known_bad import Caught, catch, known_bad
from caddie.verify.probe_case import excerpts, library, probe_case_of
from caddie.verify.probes import HELD_OUT, disjoint, examine, unanswered
from caddie.verify.sandbox import run_in_sandbox

MEMORY_BYTES, SECONDS = 8 << 30, 600.0
"""What the sealed process may take."""
_PIECES, _PIECE_BYTES = 10, 4000
_EXCESS, _STREAM_BYTES = 0.005, 12
"""What a compressed text may have above its score: a part of it, and bytes for each stream, which begins anew."""
_COMMAND = "from caddie.verify.verify import probe; probe()"
_EXAMPLE = "known_bad:"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verification found."""

    checks: tuple[Check, ...]
    caught: tuple[Caught, ...] = ()
    """What became of the known-bad examples, if they were tried."""

    @property
    def passed(self) -> bool:
        """Whether every check passed, and every known-bad example was found."""
        return all(check.passed for check in self.checks) and all(example.passed for example in self.caught)


def verify(
    artifact: Artifact,
    cap_bytes: int,
    *,
    scoring: Scoring | None = None,
    scorer: str | None = None,
    corpus: Corpus | None = None,
    examples: bool = False,
    lossless: bool = False,
) -> Verdict:
    """Check an artifact that has been read without an error, and put its scorer to the probes in a sealed process.

    `scoring` replaces the artifact's own; `scorer` is a user's, as FILE.py:NAME, or one that must fail, as
    known_bad:NAME. The probe text is from the held-out documents of `corpus`, which must be proven to be held out, or
    else from Python's library. With `examples`, every known-bad example is tried as well; with `lossless`, some of the
    documents are compressed and decompressed. `UserError` for what was asked wrongly.
    """
    chosen = scoring or artifact.scoring
    check_windows(chosen.sequence_length, chosen.stride)
    if lossless and scorer:
        raise UserError("--lossless compresses with the scoring of the artifact or of score.*; leave out --scorer")
    if scorer and scorer.startswith(_EXAMPLE):
        known_bad(scorer.removeprefix(_EXAMPLE))
    elif scorer:
        scorer = str(Path(scorer).absolute())
    checks = file_checks(artifact, cap_bytes)
    documents = library()
    if corpus is not None:
        corpus.check_counts()
        documents = _held_out_documents(corpus)
        hashes = [frozenset(read_hashes(corpus.folder, split)) for split in ("train", "validation")]
        checks.append(Check(HELD_OUT, *disjoint(*hashes)))
    probed, caught = _probe_sealed(artifact, chosen, scorer, documents, examples, lossless)
    return Verdict(checks=(*checks, *probed), caught=tuple(caught))


def _held_out_documents(corpus: Corpus) -> list[bytes]:
    if corpus.manifest.byte_source == "documents":
        return corpus.validation_documents()
    tokenizer, tokens = corpus.tokenizer(), corpus.validation_tokens()[: 1 << 16]
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.bos))
    return [text for text in map(tokenizer.decode, documents) if text]


def _probe_sealed(
    artifact: Artifact,
    scoring: Scoring,
    scorer: str | None,
    documents: Sequence[bytes],
    examples: bool,
    lossless: bool,
) -> tuple[list[Check], list[Caught]]:
    seed = secrets.randbits(32)  # so that no subject knows what comes
    path = artifact.path.absolute()
    pieces = excerpts(documents, scoring)
    batches = {
        "artifact": str(path),
        "score": scoring.to_json(),
        "scorer": scorer,
        "documents": [piece.decode("latin-1") for piece in pieces],
        "seed": seed,
        "examples": examples,
        "lossless": [piece.decode("latin-1") for piece in _sample(documents, seed)] if lossless else [],
    }
    files = [path]
    if scorer and not scorer.startswith(_EXAMPLE):
        files.append(Path(scorer.rpartition(":")[0] or scorer))
    begin = time.perf_counter()
    outcome = run_in_sandbox(
        ["-c", _COMMAND],
        readable=files,
        stdin=json.dumps(batches).encode(),
        memory_bytes=MEMORY_BYTES,
        seconds=SECONDS,
    )
    told: dict[str, Any] = {}
    trouble = outcome.stopped
    if not trouble:
        try:
            told = json.loads(outcome.stdout)
        except ValueError:
            last = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            trouble = f"it ended with status {outcome.returncode}: {last[0]}"
    if "error" in told:
        raise UserError(told["error"])
    if not trouble and file_sha256(path) != artifact.sha256:
        trouble = "the artifact is another file now"
    used = (
        f"{outcome.peak_bytes >> 20:,} of {MEMORY_BYTES >> 20:,} MiB, "
        f"{time.perf_counter() - begin:.0f} of {SECONDS:.0f} seconds; chance from seed {seed}"
    )
    probed = [Check(**check) for check in told.get("checks", [])]
    if not trouble and (silent := unanswered(probed)):
        trouble = f"it has no answer to {len(silent)} probes, such as: {silent[0]}"
    checks = [Check("runs sealed", not trouble, f"{outcome.isolation}; {trouble or used}")]
    return [*checks, *probed], [
        Caught(**{**example, "failed": tuple(example["failed"])}) for example in told.get("caught", [])
    ]


def _sample(documents: Sequence[bytes], seed: int) -> list[bytes]:
    """Pieces of the documents, drawn by chance."""
    starts = [(document, start) for document in documents for start in range(0, len(document), _PIECE_BYTES)]
    drawn = random.Random(seed).sample(starts, min(_PIECES, len(starts)))
    return [document[start : start + _PIECE_BYTES] for document, start in drawn]


def _compresses(artifact: Artifact, scoring: Scoring, documents: Sequence[bytes]) -> Check:
    """Compress documents to what they are charged, and back."""
    torch.set_num_threads(1)  # one token at a time is too little for two to share
    found = measure(artifact, documents, scoring=scoring)
    allowed = found.promised_bytes * (1 + _EXCESS) + found.streams * _STREAM_BYTES + found.head_bytes
    source = found.source_bytes
    evidence = (
        f"{source:,} bytes became {found.compressed_bytes:,} in {found.streams} streams and "
        f"{'came back' if found.exact else 'came back changed'}; their score promises {found.promised_bytes:,.0f} "
        f"({8 * found.promised_bytes / source:.4f} bits per byte), {found.excess:+.2%} off; "
        f"{found.compress_seconds:.0f} and {found.decompress_seconds:.0f} seconds"
    )
    if found.claimed_bytes != found.promised_bytes:
        claimed = 8 * found.claimed_bytes / source
        evidence += f"; of the text that the tokenizer makes of them the score is {claimed:.4f}"
    if stored := not found.streams and found.claimed_bytes < found.compressed_bytes:
        evidence += "; it was stored as it is"
    return Check("compresses to its score", found.exact and found.compressed_bytes <= allowed and not stored, evidence)


def probe() -> None:
    """What the sealed process does: read from standard input what to try, and write what was found as JSON."""
    batches = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a user's scorer may print
            told = _probed(batches)
    except UserError as error:
        told = {"error": str(error)}
    print(json.dumps(told))


def _probed(batches: dict[str, Any]) -> dict[str, Any]:
    artifact = load(Path(batches["artifact"]))
    scoring = Scoring.from_json(batches["score"])
    documents = [document.encode("latin-1") for document in batches["documents"]]
    short = probe_case_of(artifact, scoring.plain, documents, seed=batches["seed"], short=True)

    def work(threads: int) -> None:
        torch.set_num_threads(threads)
        short.open().price(short.tokens, short.shown)

    torch.set_num_threads(quickest(thread_counts(), work))
    scorer = batches["scorer"]
    if scorer and scorer.startswith(_EXAMPLE):
        trial = known_bad(scorer.removeprefix(_EXAMPLE)).put(short)
    else:
        trial = probe_case_of(artifact, scoring, documents, seed=batches["seed"], scorer=scorer)
    checks = examine(trial)
    if batches["lossless"]:
        checks.append(_compresses(artifact, scoring, [document.encode("latin-1") for document in batches["lossless"]]))
    caught = catch(short) if batches["examples"] else []
    return {"checks": [asdict(check) for check in checks], "caught": [asdict(example) for example in caught]}
