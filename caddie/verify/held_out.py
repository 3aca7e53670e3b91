"""Checks that held-out text is neither training text nor nearly so, and that the tokenizer does not lose or store it.

Hashes of documents miss a copy with a few changes. The probes see excerpts only; a tokenizer may treat whole documents
differently.
"""

import math
import random
import secrets
import statistics
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from caddie.data.contamination import shared_ngrams
from caddie.data.corpus import Corpus, read_hashes, tokens_hash
from caddie.data.shards import Tokens, read, split_documents
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError, count
from caddie.runtime.progress import SILENT, Progress
from caddie.verify.probes import HELD_OUT, Check, check_disjoint, check_loss

VOCABULARY = "held-out text is not in the vocabulary"
COMES_BACK = "whole held-out documents come back"
_TEXT_BYTES, _LONGEST = 1 << 20, 4 << 20
"""Bytes of text to decode (the last document whole), and bytes at which a longer document is cut."""
_DECODED = 1 << 16
"""Most tokens to decode for a corpus without documents."""
_MOST_DROPPED = 0.1
"""Largest share of the held-out bytes that its tokens may leave out; the contest's tokenizers leave out 0.02 %."""
_SLACK_BYTES = 512
"""Bytes that may be lost on top of the share that the probe allows: xz spends more on the first words."""
_MEASURED, _LEAST_TOKENS = 2000, 32
"""Documents read of each split, and the tokens above which one is measured."""
_LONGER, _CHANCE = 1.25, 1e-6
"""Ratio of mean bytes per token above which the check fails, if the p of the rank test is also below `_CHANCE`."""
_DOUBTFUL, _UNUSED, _TIMES = 0.01, 0.05, 4
"""Shares of held-out bytes in long ids that training text never uses: doubtful above the first, a cheat above the
second, both only above `_TIMES` times the expected share."""
_LONG = 2
"""Multiple of the mean bytes per token above which an id is long; shorter ids make no text cheap."""
_LOOKED_UP = 1 << 24
"""Training tokens whose ids are looked up."""
NEAR_COPIES = "held-out text is not nearly training text"
_NGRAM_BYTES = 50
"""Bytes of an n-gram, on average: eight to nine words of English."""
_MOST_COPIED = 0.5
"""Share of a document's n-grams above which it is a copy, and share of documents and of text that may be copies. Of
Python's library, whose modules resemble one another, 7 to 15 % are copies, and of web text less than 1 %."""
_LEAST_COPIES, _NEARLY_ALL = 8, 0.9
"""Copies below which the result may be chance, and share of common n-grams above which it is not."""
_NAMED = 3
TRAINED_ON = "training shards hold the training documents"
_SHARDS, _SHARD_TOKENS, _HASHED_DOCUMENTS = 8, 1 << 18, 200
"""Shards to read, tokens to read of each, and documents in all whose hashes are looked up."""
_HASHED = 0.95
"""Share that must be found of those documents that decode unchanged."""


def held_out_documents(corpus: Corpus) -> list[bytes]:
    """Return the held-out documents of a corpus, or decode its first tokens if it holds tokens only."""
    if corpus.manifest.byte_source == "documents":
        return corpus.validation_documents()
    tokenizer, tokens = corpus.tokenizer(), corpus.validation_tokens()[:_DECODED]
    return [text for text in map(tokenizer.decode, split_documents([tokens], tokenizer.bos)) if text]


def check_held_out(
    tokenizer: Tokenizer, corpus: Corpus, documents: Sequence[bytes], progress: Progress = SILENT
) -> list[Check]:
    """Return the checks of a corpus's held-out `documents`; without training shards, only those that need none."""
    split = corpus.manifest.validation
    hashes = [frozenset(read_hashes(corpus.folder, name)) for name in ("train", "validation")]
    passed, evidence = check_disjoint(*hashes)
    try:
        shards = corpus.train_shards()
    except UserError:  # scoring needs the held-out part alone, and only that may be here
        shards = []
        evidence += "; the training text is not here, so its near copies and the vocabulary are not looked at"
    checks = [Check(HELD_OUT, passed, evidence)]
    if corpus.manifest.byte_source == "documents":
        dropped = 1 - split.normalized_bytes / split.source_bytes
        checks.append(check_comes_back(tokenizer, documents, secrets.randbits(32), dropped))
    if shards:
        checks.append(check_vocabulary(tokenizer, corpus.validation_tokens(), shards))
        checks += check_training_documents(tokenizer, corpus, shards, secrets.randbits(32))
        checks += check_near_copies(tokenizer, corpus, shards, secrets.randbits(32), progress)
    return checks


def check_comes_back(tokenizer: Tokenizer, documents: Sequence[bytes], seed: int, dropped: float = 0.0) -> Check:
    """Check how much text whole documents lose when encoded and decoded, as the probe does with excerpts.

    Documents are drawn with chances in proportion to their bytes. `dropped` is the share of all held-out bytes
    that the tokens leave out.
    """
    drawn = _by_bytes(documents, seed)
    size, back = sum(map(len, drawn)), map(tokenizer.decode, tokenizer.encode_many(drawn))
    changed = [pair for pair in zip(drawn, back, strict=True) if pair[0] != pair[1]]
    passed, evidence = check_loss(changed, size, _SLACK_BYTES)
    if dropped > _MOST_DROPPED:
        passed, evidence = False, f"{evidence}; of all held-out bytes, its tokens leave out {dropped:.1%}"
    return Check(COMES_BACK, passed, f"{size:,} bytes in {count(len(drawn), 'document')}{evidence}")


def _by_bytes(documents: Sequence[bytes], seed: int) -> list[bytes]:
    """Draw documents, the longer the likelier, until they have `_TEXT_BYTES` (Efraimidis and Spirakis 2006)."""
    chance, drawn, size = random.Random(seed), list[bytes](), 0
    keys = [chance.random() ** (1 / max(1, len(document))) for document in documents]
    for place in sorted(range(len(documents)), key=lambda place: -keys[place]):
        if size >= _TEXT_BYTES:
            break
        drawn.append(documents[place][:_LONGEST])
        size += len(drawn[-1])
    return drawn


def check_vocabulary(tokenizer: Tokenizer, held_out: Tokens, shards: Sequence[Tokens]) -> Check:
    """Check that held-out text is not spelled in ids of its own, nor in longer ones than training text.

    A random split makes documents of both alike, so their mean bytes per token are compared by rank (Mann and Whitney
    1947). The means must differ by a quarter too, since a split need not be random. The share of held-out bytes in long
    ids that training text never uses should be about the share of training bytes in long ids that only one training
    document uses (Good 1953).
    """
    sizes = np.array([len(piece) for piece in tokenizer.token_bytes])
    unused, expected = _unused(held_out, shards, sizes, tokenizer.bos)
    passed: bool | None = True
    if unused > max(_DOUBTFUL, _TIMES * expected):
        passed = None if unused <= _UNUSED else False
    evidence = (
        f"{unused:.1%} of the held-out bytes in long ids that training text does not use, {expected:.1%} expected"
    )
    found, usual = (_mean_lengths(text, sizes, tokenizer.bos) for text in ([held_out], shards))
    if found and usual:
        from scipy.stats import mannwhitneyu  # not above: it takes half a second

        means = statistics.fmean(found), statistics.fmean(usual)
        p = float(mannwhitneyu(found, usual, alternative="greater").pvalue)
        least = 1 / math.comb(len(found) + len(usual), len(found))  # with few documents p is approximate
        if means[0] > _LONGER * means[1] and max(p, least) < _CHANCE:
            passed = False
        documents = f"{len(found):,} held-out documents, {means[1]:.2f} in {len(usual):,} others"
        evidence = f"{means[0]:.2f} bytes a token in {documents}; {evidence}"
    return Check(VOCABULARY, passed, evidence)


def _mean_lengths(shards: Sequence[Tokens], sizes: npt.NDArray[np.int64], bos: int) -> list[float]:
    documents = islice(split_documents(shards, bos), _MEASURED)
    return [float(sizes[ids[1:]].mean()) for ids in documents if len(ids) > _LEAST_TOKENS]


def _unused(held_out: Tokens, shards: Sequence[Tokens], sizes: npt.NDArray[np.int64], bos: int) -> tuple[float, float]:
    """Return two shares: held-out bytes in long ids of no training document, training bytes in long ids of just one.

    Only the first `_LOOKED_UP` training tokens are read.
    """
    first, last, counts = (np.zeros(len(sizes), np.int64) for _ in range(3))  # documents are numbered from 1
    seen, begun = 0, 1
    for shard in shards:
        tokens = read(shard, 0, min(len(shard), _LOOKED_UP - seen))
        seen += len(tokens)
        if len(tokens) and int(tokens.max()) >= len(sizes):
            raise UserError(f"a training shard holds ids over {len(sizes) - 1:,}; prepare the data again")
        numbers = np.cumsum(tokens == bos, dtype=np.int32) + np.int32(begun)
        begun = int(numbers[-1]) if len(numbers) else begun
        here = np.zeros_like(first)
        here[tokens[::-1]] = numbers[::-1]  # for equal indices the last one counts
        first = np.where(first, first, here)
        last[tokens] = numbers
        counts += np.bincount(tokens, minlength=len(sizes))
    spelled, other = (held * sizes for held in (counts, np.bincount(held_out, minlength=len(sizes))))
    long = sizes > _LONG * spelled.sum() / max(1, seen)
    unused, lone = long & (last == 0), long & (first == last) & (last > 0)
    return float(other[unused].sum() / max(1, other.sum())), float(spelled[lone].sum() / max(1, spelled.sum()))


def check_training_documents(tokenizer: Tokenizer, corpus: Corpus, shards: Sequence[Tokens], seed: int) -> list[Check]:
    """Check that documents drawn from the training shards are among the hashed ones; no check if none is whole.

    Exchanged shards would hide what the artifact was trained on. If the tokenizer changes most documents, the check is
    inconclusive at worst.
    """
    chance, drawn = random.Random(seed), list[Tokens]()
    for shard in chance.sample(shards, min(_SHARDS, len(shards))):
        begin = chance.randrange(max(1, len(shard) - _SHARD_TOKENS))
        whole = list(split_documents([read(shard, begin, min(_SHARD_TOKENS, len(shard) - begin))], tokenizer.bos))
        drawn += [ids for ids in whole[:-1] if ids[0] == tokenizer.bos]  # the last may be cut
    if not drawn:
        return []
    drawn = chance.sample(drawn, min(_HASHED_DOCUMENTS, len(drawn)))
    known = read_hashes(corpus.folder, "train")
    found = sum(tokens_hash(tokenizer, ids, corpus.manifest.hashed) in known for ids in drawn)
    trip = corpus.manifest.tokenizer.round_trip
    changed = trip.changed_documents / max(1, trip.documents) if trip else 0.0
    enough = found > 0 and found >= _HASHED * (1 - changed) * len(drawn)
    passed = True if enough else None if changed > 0.5 else False
    return [Check(TRAINED_ON, passed, f"{found:,} of {len(drawn):,} documents drawn from the shards were hashed")]


def check_near_copies(
    tokenizer: Tokenizer, corpus: Corpus, shards: Sequence[Tokens], seed: int, progress: Progress = SILENT
) -> list[Check]:
    """Check that held-out documents do not share most n-grams with training text; no check if none has an n-gram."""
    tokens, split = corpus.validation_tokens(), corpus.manifest.validation
    length = max(1, round(_NGRAM_BYTES * split.tokens / split.source_bytes))
    found = shared_ngrams(tokens, shards, tokenizer.bos, length, seed, progress)
    if not (total := int(found.counted.sum())):
        return []
    copies = np.flatnonzero(found.shared > _MOST_COPIED * found.counted)
    shares = float(found.counted[copies].sum()) / total, len(copies) / len(found.counted)
    evidence = (
        f"{count(len(copies), 'document')} of {len(found.counted):,}, {shares[0]:.1%} of the text (up to half "
        f"of either passes), with more than half of their n-grams of {length} tokens in training text; "
        f"{found.shared.sum() / total:.1%} of all {total:,}"
    )
    if len(copies):
        documents = [ids[1:] for ids in split_documents([tokens], tokenizer.bos)]
        begins = (tokenizer.decode(documents[one][:_NGRAM_BYTES]) for one in copies[:_NAMED])
        named = ", ".join(ascii(text.decode(errors="replace")[:30]) for text in begins)
        evidence += f"; such documents begin with {named}"
    most = [share > _MOST_COPIED for share in shares]
    certain = all(most) and (len(copies) >= _LEAST_COPIES or found.shared.sum() > _NEARLY_ALL * total)
    passed = True if not any(most) else False if certain else None
    return [Check(NEAR_COPIES, passed, evidence)]
