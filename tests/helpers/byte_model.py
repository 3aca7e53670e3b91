"""The plainest model of text that learns: counts of a byte after the two before it."""

import math
from collections import Counter
from collections.abc import Iterable


def order_two_bits_per_byte(training: Iterable[bytes], held_out: Iterable[bytes]) -> float:
    """Return what a byte of the held-out documents costs under counts of the training documents.

    A byte's probability after two others is Witten and Bell's mean of its share among those that followed them and of
    its probability after the last of the two alone, and so on down to one in 256.
    """
    followed: Counter[bytes] = Counter()
    for document in training:
        for order in range(4):
            followed.update(document[i : i + order] for i in range(len(document) - order + 1) if order)
    totals: Counter[bytes] = Counter()
    kinds: Counter[bytes] = Counter()
    for gram, count in followed.items():
        totals[gram[:-1]] += count
        kinds[gram[:-1]] += 1
    bits, size = 0.0, 0
    for document in held_out:
        for i in range(len(document)):
            probability = 1 / 256
            for order in range(min(i, 2) + 1):
                before = document[i - order : i]
                if total := totals[before]:
                    found = followed[before + document[i : i + 1]]
                    probability = (found + kinds[before] * probability) / (total + kinds[before])
            bits -= math.log2(probability)
        size += len(document)
    return bits / size
