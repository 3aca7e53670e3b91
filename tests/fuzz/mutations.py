"""Small random changes of bytes and of JSON: the alphabet of the fuzzer."""

import copy
import json
import random
from typing import Any

EXTREMES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 64, 255, 256, 65_535, 65_536, 2**20, 2**31, 2**32, 2**62, 2**63, 10**400),
    *(0.5, -0.5, 1e-300, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "x" * 3000, "\ud800", "\x00", "none", "nan", "1e999", "../..", "/", "a\nb", "é", "0" * 64),
    *([], {}, [[]], [1], {"kind": "GPT"}, {"kind": "os.system"}, {"": None}, {"*": {"kind": "Rows"}}),
]
_INTEGERS = [0, 1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]
_NESTED = ("[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900)


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """Change bytes in one to three places, or the length."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(len(found) + 1)
        count = chance.choice((1, 1, 2, 4, 8, 64))
        kind = chance.randrange(8)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            found[at : at + count] = chance.randbytes(count)
        elif kind == 2:
            found[at:at] = chance.randbytes(count)
        elif kind == 3:
            del found[at : at + count]
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            size = chance.choice((1, 2, 4))
            number = chance.choice(_INTEGERS) % (1 << 8 * size)
            found[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))
        elif kind == 6:
            found[at : at + count] = bytes([chance.choice((0, 255))]) * count
        else:
            other = chance.randrange(len(found) + 1)
            found[at:at] = found[other : other + count]
    return bytes(found)


def mutated_arrays(chance: random.Random, data: bytes) -> bytes:
    """Change one of several coded arrays, each after its length of 4 bytes, and put the lengths right."""
    parts, at = [], 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(data) or not parts:
        return mutated_bytes(chance, data)
    number = chance.randrange(len(parts))
    parts[number] = parts[number][:1] + mutated_bytes(chance, parts[number][1:])
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def mutated_json(chance: random.Random, data: bytes) -> bytes:
    """Change one to three values of JSON, its keys or its nesting; now and then its bytes."""
    if chance.random() < 0.03:
        return mutated_bytes(chance, data)
    if chance.random() < 0.01:
        return chance.choice(_NESTED).encode()
    value = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        node, key = chance.choice(places)
        _change(chance, node, key, [other[k] for other, k in places])
    text = json.dumps(value)
    if chance.random() < 0.01:
        leaf = json.dumps(chance.choice(EXTREMES))
        text = text.replace(leaf, chance.choice(_NESTED), 1)
    return text.encode()


def _change(chance: random.Random, node: Any, key: Any, values: list[Any]) -> None:
    """Change what stands at one place of JSON."""
    kind = chance.randrange(8)
    if kind < 4:
        node[key] = copy.deepcopy(chance.choice(EXTREMES))
    elif kind == 4 and isinstance(node[key], (int, float)) and abs(node[key]) < 2**64:
        node[key] = node[key] * chance.choice((-1, 0, 2, 0.5, 1000, 1e30)) + chance.choice((0, 1, -1))
    elif kind == 5:
        del node[key]
    elif kind == 6:
        node[key] = copy.deepcopy(chance.choice(values))
    elif isinstance(node, dict):
        node[str(chance.choice(EXTREMES))] = copy.deepcopy(node[key])
    else:
        node.append(copy.deepcopy(node[key]))


def _places(value: Any) -> Any:
    """Yield every node with a key of it, outermost first."""
    left = [value]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            yield node, key
            left.append(node[key])
