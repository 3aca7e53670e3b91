"""Check that the held-out text is not training text with a few changes, which hashes of documents do not see."""

from __future__ import annotations

import random

import numpy as np

from caddie.data.contamination import shared_ngrams
from caddie.data.corpus import Corpus, read_hashes, tokens_hash
from caddie.data.shards import Tokens, read, split_documents
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError, count
from caddie.runtime.progress import SILENT, Progress
from caddie.verify.probes import Check

NEAR_COPIES = "held-out text is not nearly training text"
_BYTES = 50
"""Bytes of an n-gram, on average: eight to nine words of English."""
_MOST = 0.5
"""Share of a document's n-grams above which it is a copy, and share of documents and of text that copies may be. Of
Python's library, whose modules resemble one another, 7 to 15 % are copies, and of web text less than 1 %."""
_LEAST = 8
"""With fewer copies this may be chance."""
_NAMED = 3
TRAINED_ON = "training shards hold the training documents"
_SHARDS, _TOKENS, _DOCUMENTS = 8, 1 << 18, 200
"""Shards, tokens of each and documents together of which the hashes are looked up."""
_HASHED = 0.95
"""Least share of those documents that must be found, of the ones that their tokens do not change."""


def check_training_documents(tokenizer: Tokenizer, corpus: Corpus, seed: int) -> list[Check]:
    """Check that documents of the training shards are among those that were hashed; none without shards.

    Other shards in their place would hide what the artifact was trained on. Where the tokenizer changes most documents
    the check is inconclusive at worst.
    """
    try:
        shards = corpus.train_shards()
    except UserError:
        return []
    chance, drawn = random.Random(seed), list[Tokens]()
    for shard in chance.sample(shards, min(_SHARDS, len(shards))):
        begin = chance.randrange(max(1, len(shard) - _TOKENS))
        whole = list(split_documents([read(shard, begin, min(_TOKENS, len(shard) - begin))], tokenizer.bos))
        drawn += [ids for ids in whole[:-1] if ids[0] == tokenizer.bos]  # the last may go on
    if not drawn:
        return []
    drawn = chance.sample(drawn, min(_DOCUMENTS, len(drawn)))
    known = read_hashes(corpus.folder, "train")
    found = sum(tokens_hash(tokenizer, ids, corpus.manifest.hashed) in known for ids in drawn)
    trip = corpus.manifest.tokenizer.round_trip
    changed = trip.changed_documents / max(1, trip.documents) if trip else 0.0
    passed = True if found >= _HASHED * (1 - changed) * len(drawn) else None if changed > 0.5 else False
    return [Check(TRAINED_ON, passed, f"{found:,} of {len(drawn):,} documents drawn from the shards were hashed")]


def check_near_copies(tokenizer: Tokenizer, corpus: Corpus, seed: int, progress: Progress = SILENT) -> list[Check]:
    """Return the check; none without training shards, or where no held-out document has an n-gram."""
    try:
        shards = corpus.train_shards()
    except UserError:  # scoring needs the held-out part alone, and only that may be here
        return []
    tokens, split = corpus.validation_tokens(), corpus.manifest.validation
    length = max(1, round(_BYTES * split.tokens / split.source_bytes))
    found = shared_ngrams(tokens, shards, tokenizer.bos, length, seed, progress)
    if not (total := int(found.counted.sum())):
        return []
    copies = np.flatnonzero(found.shared > _MOST * found.counted)
    shares = float(found.counted[copies].sum()) / total, len(copies) / len(found.counted)
    evidence = (
        f"{count(len(copies), 'document')} of {len(found.counted):,}, {shares[0]:.1%} of the text, with more than half "
        f"of their n-grams of {length} tokens in training text; {found.shared.sum() / total:.1%} of all {total:,}"
    )
    if len(copies):
        documents = [ids[1:] for ids in split_documents([tokens], tokenizer.bos)]
        begins = (tokenizer.decode(documents[one][:_BYTES]).decode(errors="replace")[:30] for one in copies[:_NAMED])
        evidence += f"; such documents begin with {', '.join(map(ascii, begins))}"
    most = [share > _MOST for share in shares]
    passed = True if not any(most) else False if all(most) and len(copies) >= _LEAST else None
    return [Check(NEAR_COPIES, passed, evidence)]
