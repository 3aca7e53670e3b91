"""Illegal scoring in other words than the rules know is still found, and legal scoring in other words is not.

Each case changes one legal script, which writes and reads back its model and scores text before it learns from it.
"""

import base64
import lzma
from pathlib import Path

import pytest
from submission_folder import write_submission

from caddie.submit import review_code
from caddie.submit.review import review

LEGAL = """
import glob, io, os, zlib
import numpy as np
import torch
import torch.nn.functional as F


class Settings:
    data = os.environ.get("DATA", "./data")
    train_files = os.path.join(data, "fineweb_train_*.bin")
    val_files = os.path.join(data, "fineweb_val_*.bin")


def read_shards(pattern):
    tokens = torch.cat([torch.from_numpy(np.fromfile(file, "<u2")) for file in sorted(glob.glob(pattern))])
    usable = tokens.numel() // 1024 * 1024
    return tokens[: usable + 1]


class Stream:
    def __init__(self, pattern):
        self.tokens, self.at = read_shards(pattern), 0

    def take(self, count):
        self.at += count
        return self.tokens[self.at - count : self.at]


def tables(sp, count):
    lengths = np.zeros(count)
    for piece in range(count):
        lengths[piece] = len(sp.id_to_piece(piece).lstrip("\\u2581").encode())
    return torch.tensor(lengths), sp.starts, sp.edges


def adapt(model, text, lengths, starts, edges):
    nats = torch.zeros(()); width = torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for part in range(text.numel() // 1024):
        chunk = text[part * 1024 : part * 1024 + 1025].long()
        before, after = chunk[:-1], chunk[1:]
        with torch.inference_mode():
            logits = model.scores(before)
            costs = F.cross_entropy(logits.reshape(-1, logits.size(-1)), after, reduction="none")
            nats += costs.sum()
            width += (lengths[after] + (starts[after] & ~edges[before])).sum()
        for epoch in range(3):
            loss = model(before, after)
            loss.backward()
            optimizer.step()
    return nats / width


def train(model, stream, optimizer):
    for step in range(20000):
        x = stream.take(1025)
        loss = model(x[:-1], x[1:])
        loss.backward()
        optimizer.step()


def main(sp, model, scored, optimizer):
    args = Settings()
    held = read_shards(args.val_files)
    train(model, Stream(args.train_files), optimizer)
    weights = model.state_dict()
    with open("model.bin", "wb") as file:
        file.write(zlib.compress(pack(weights)))
    with open("model.bin", "rb") as file:
        back = unpack(zlib.decompress(file.read()))
    scored.load_state_dict(back)
    print(adapt(scored, held, *tables(sp, 1024)))
"""

SHIFT = """
def centre(z, y):
    shift = torch.zeros_like(z[:1])
    for _ in range(8):
        shift += (F.one_hot(y, z.size(-1)) - torch.softmax(z + shift, -1)).mean(0, keepdim=True)
    return z + shift
"""
POLISH = """
def polish(net, stream):
    opt = torch.optim.AdamW(net.parameters())
    for block in stream.view(-1, 1025):
        net(block[:-1], block[1:]).backward()
        opt.step()
"""
FINE = """
def fine_tune(net, source, optimizer):
    for _ in range(400):
        block = source.take(1025)
        g = torch.autograd.grad(net(block[:-1], block[1:]), list(net.parameters()))
        optimizer.apply(g)
"""
TUNER = """
class Tuner:
    def __init__(self, net, words):
        self.net, self.words = net, words

    def go(self):
        for piece in self.words.split(1025):
            self.net(piece[:-1], piece[1:]).backward()
            self.rule.step()
"""
CACHE = """
def recall(costs, x, y, memo):
    pair = (x * 36313 + torch.roll(x, 1)) % 4096
    seen = memo[1, (pair * 51647 + y) % 4096] / memo[0, pair].clamp_min(1)
    return -torch.lerp(torch.exp(-costs), seen, 0.5).log()
"""
HOOKS = """    seen = {}
    for layer in model.modules():
        layer.register_forward_pre_hook(lambda m, a: seen.update({m: a[0].square().mean(0)}))
    model.scores(held[:65536])
    weights = quantize(model.state_dict(), seen)
"""
COSTS = 'costs = F.cross_entropy(logits.reshape(-1, logits.size(-1)), after, reduction="none")'
SCORES = "            logits = model.scores(before)\n"
BACK = "    scored.load_state_dict(back)\n"
WEIGHTS = "    weights = model.state_dict()\n"
PASSES = """    for part in [*range(text.numel() // 1024)] * 2:
        if part == 0:
            nats.zero_(); width.zero_()
"""
PARTS = "    for part in range(text.numel() // 1024):\n"
TABLE = "    memo = torch.zeros(1024, 1024)\n"
WITH_TABLE = SCORES + " " * 12 + "logits = logits + memo[before]\n"


def learnt(signature: str, stream: str, before: str = "", more: str = "") -> str:
    """A function that learns from text which reaches it in this way."""
    lines = (f"    for block in {stream}:\n", "        net(block[:-1], block[1:]).backward()\n", "        opt.step()\n")
    return f"{more}\n\ndef learn({signature}):\n{before}" + "".join(lines)


def reached(call: str, made: str) -> tuple[str, str, str, str]:
    """The cheat that calls such a function before quantization."""
    return made, WEIGHTS, f"    {call}\n{WEIGHTS}", "trains-on-validation"


def filled(line: str, before: bool) -> tuple[str, str, str]:
    """A cache of what came after what, filled before or after the text is scored."""
    new = " " * 12 + line + "\n" + WITH_TABLE if before else WITH_TABLE
    old = SCORES + " " * 12 + COSTS + "\n"
    after = "" if before else " " * 12 + line + "\n"
    return "", PARTS + OPENING + old, TABLE + PARTS + OPENING + new + " " * 12 + COSTS + "\n" + after


OPENING = LEGAL[LEGAL.index(PARTS) + len(PARTS) : LEGAL.index(SCORES)]
FILLS = {
    "an index": "memo[before, after] += 1",
    "a method": "memo.index_put_((before, after), torch.ones(()), accumulate=True)",
    "a view": "memo.view(-1).scatter_add_(0, before * 1024 + after, torch.ones(1024))",
    "NumPy": "np.add.at(memo, (before, after), 1)",
}
FILLING = "        memo[before, after] += 1\n"
CAPS = ("costs.clamp(max=8)", "costs.clamp(0, 8)", "torch.clamp(costs, max=8)", "np.clip(costs, 0, 8)")
TEXTS = "    held = read_shards(args.val_files)\n    train(model, Stream(args.train_files), optimizer)\n"

CHEATS = {
    "learnt from a generator": reached(
        "learn(model, optimizer)",
        learnt(
            "net, opt", "pieces()", more="\ndef pieces():\n    yield from read_shards('fineweb_val_0.bin').split(9)\n"
        ),
    ),
    "learnt by a default": reached(
        "learn(model, optimizer)", learnt("net, opt, at='fineweb_val_0.bin'", "read_shards(at).split(9)")
    ),
    "learnt by part of a call": reached(
        "functools.partial(learn, model, optimizer, held)()", learnt("net, opt, t", "t.split(9)")
    ),
    "learnt by other names": reached("learn(model, optimizer, t=held)", learnt("net, opt, **k", "k['t'].split(9)")),
    "learnt by further places": reached("learn(model, optimizer, held)", learnt("net, opt, *k", "k[0].split(9)")),
    "learnt by a starred call": reached("learn(*(model, optimizer, held))", learnt("net, opt, t", "t.split(9)")),
    "learnt by a global": reached(
        "keep(held)\n    learn(model, optimizer)",
        learnt("net, opt", "KEPT.split(9)", more="\nKEPT = None\ndef keep(t):\n    global KEPT\n    KEPT = t\n"),
    ),
    "learnt from a dict by a loop": reached(
        "texts = {part: read_shards('fineweb_val_0.bin') for part in ('a',)}\n    learn(model, optimizer, texts['a'])",
        learnt("net, opt, t", "t.split(9)"),
    ),
    "learnt from one of two dicts": reached(
        "texts = {'a': held}\n    if sp is None:\n        texts = {'a': None}\n    learn(model, optimizer, texts['a'])",
        learnt("net, opt, t", "t.split(9)"),
    ),
    "learnt with gradients switched on": reached(
        "with torch.no_grad():\n        learn(model, optimizer, held)",
        learnt("net, opt, t", "t.split(9)", before="    torch.set_grad_enabled(True)\n"),
    ),
    "learnt from a changed dict": reached(
        "texts = {'a': None, 'b': held}\n    for _ in range(2):\n"
        "        learn(model, optimizer, texts['a'])\n        texts['a'] = texts['b']",
        learnt("net, opt, t", "t.split(9)"),
    ),
    **{f"a cache filled too early, by {how}": (*filled(line, True), "target") for how, line in FILLS.items()},
    **{
        f"a cache filled by a loop of its own{later}": (
            "",
            PARTS + OPENING + SCORES,
            TABLE + PARTS + OPENING[: OPENING.index("        with")] + FILLING + line + PARTS + OPENING + WITH_TABLE,
            "target",
        )
        for later, line in (("", ""), (", then scaled", "    memo.mul_(2)\n"))
    },
    **{f"costs of at most 8 bits, {cap}": ("", COSTS, f"{COSTS}; costs = {cap}", "selection") for cap in CAPS},
    "validation cut by a number that is set": (
        "",
        "    print(adapt",
        "    held = held[: int(os.environ.get('MOST', 8_000_000))]\n    print(adapt",
        "cut",
    ),
    "validation cut in a branch": (
        "",
        "    print(adapt",
        "    if not int(os.environ.get('FULL', '0')):\n        held = held[:8_000_000]\n    print(adapt",
        "cut",
    ),
    "slot by a gradient of one's own": (
        SHIFT,
        SCORES,
        SCORES + " " * 12 + "logits = centre(logits, after)\n",
        "target",
    ),
    "before quantization": (POLISH, WEIGHTS, "    polish(model, held)\n" + WEIGHTS, "trains-on-validation"),
    "before quantization, where a pattern matches": (
        POLISH,
        WEIGHTS,
        "    match sp.kind:\n        case 1:\n            polish(model, held)\n" + WEIGHTS,
        "trains-on-validation",
    ),
    "before quantization, from a stream": (
        FINE,
        WEIGHTS,
        "    fine_tune(model, Stream(args.val_files), optimizer)\n" + WEIGHTS,
        "trains-on-validation",
    ),
    "before quantization, by a class": (
        TUNER,
        WEIGHTS,
        "    Tuner(model, held).go()\n" + WEIGHTS,
        "trains-on-validation",
    ),
    "scored and learned twice": (
        "",
        "    print(adapt",
        "    for _ in range(2):\n        score = adapt(scored, held, *tables(sp, 1024))\n    print(score, adapt",
        "rescoring",
    ),
    "costly tokens discounted": (
        "",
        COSTS,
        COSTS + "; costs = torch.where(costs > 5, costs * 0.9, costs)",
        "selection",
    ),
    "the costliest token left out": ("", COSTS, COSTS + "; costs = costs.sort().values[:-1]", "selection"),
    "text read backwards": (
        "",
        SCORES,
        SCORES + " " * 12 + "logits = logits + model.scores(before.flip(0))\n",
        "target",
    ),
    "weights from another file": ("", BACK, "    back.update(torch.load(os.environ['MORE']))\n" + BACK, "live"),
    "training files that take in validation": ("", "fineweb_train_*.bin", "fineweb_*_*.bin", "training-files"),
    "two passes in one loop": ("", PARTS, PASSES, "rescoring"),
    "an outer loop of passes": (
        "",
        PARTS,
        "    for again in range(2):\n     for part in range(text.numel() // 1024):\n",
        "rescoring",
    ),
    "a cache that does not sum to one": (
        CACHE,
        COSTS,
        COSTS + "; costs = recall(costs, before, after, memo)",
        "mixture",
    ),
    "the target's class": (
        "",
        SCORES,
        SCORES + " " * 12 + "logits = torch.where(starts[after][:, None] == starts, logits, logits - 4)\n",
        "target",
    ),
    "scales from validation activations": ("", WEIGHTS, HOOKS, "calibration"),
    "a space counted twice": ("", '.lstrip("\\u2581")', '.replace("\\u2581", " ")', "bytes"),
    "weights from a hub": ("", BACK, "    back.update(torch.hub.load_state_dict_from_url(url))\n" + BACK, "network"),
    "a module by a made name": ("", BACK, "    web = __import__('importlib').import_module(name)\n" + BACK, "hidden"),
    "weights from a disk": ("", BACK, "    back.update(torch.load('/data/cache/tables.pt'))\n" + BACK, "outside"),
    "costly parts dropped": (
        "",
        "            nats +=",
        "            if costs.mean() > 6:\n                continue\n            nats +=",
        "selection",
    ),
    "the best of three temperatures": (
        "",
        COSTS,
        "costs = torch.stack([F.cross_entropy(logits * t, after, reduction='none') for t in (0.9, 1, 1.1)]).amin(0)",
        "selection",
    ),
    "weights that were never packed": ("", BACK, "    scored.load_state_dict({**back, **weights})\n", "live"),
    "the prediction of the next place": (
        "",
        SCORES,
        SCORES + " " * 12 + "logits = torch.logaddexp(logits, torch.roll(logits, -1, 0))\n",
        "target",
    ),
    "validation cut unless told otherwise": (
        "",
        "return tokens[: usable + 1]",
        "return tokens[: usable + 1] if int(os.environ.get('FULL', '0')) else tokens[: usable // 5 + 1]",
        "cut",
    ),
}

MIX = """
def mix(p, counts, a=0.2):
    q = counts / counts.sum(-1, keepdim=True)
    return (1 - a) * p + a * q


def calibration_error(net, val_tokens):
    return net.scores(val_tokens).softmax(-1).amax(-1).mean()
"""
PRICE = """
def price(logits, x, y, lengths, starts, edges):
    nats, size = 0.0, 0.0
    each = F.cross_entropy(logits, y, reduction="none").view_as(y)
    nats += each.sum()
    size += (lengths[y] + (starts[y] & ~edges[x])).sum()
    return nats, size
"""
SUMS = """more, wider = price(logits, before, after, lengths, starts, edges)
            nats = nats + more
            width = width + wider
"""
PROBE = "        with torch.no_grad():\n            print(model.scores(held[:1024]).mean())\n"
BOTH = """
class Both:
    def __init__(self, first, second):
        self.first, self.second = Stream(first), read_shards(second)
"""
STEP = """
def step_of(net, block, learns):
    loss = net(block[:-1], block[1:])
    if learns:
        loss.backward()
    return loss
"""
HONEST = {
    "as it is": ("", "", ""),
    **{f"a cache filled after scoring, by {how}": filled(line, False) for how, line in FILLS.items()},
    "costs kept by slices": (
        "",
        "            nats += costs.sum()\n",
        "            kept[part * 1024 : part * 1024 + 1024] = costs\n",
    ),
    "texts in a dict": (
        "",
        TEXTS,
        "    texts = {'a': args.train_files, 'b': args.val_files}\n    held = read_shards(texts['b'])\n"
        "    train(model, Stream(texts['a']), optimizer)\n",
    ),
    "texts in a dict by a loop": (
        "",
        TEXTS,
        "    texts = {part: f'data/fineweb_{part}_*.bin' for part in ('train', 'val')}\n"
        "    held = read_shards(texts['val'])\n    train(model, Stream(texts['train']), optimizer)\n",
    ),
    "texts in an object": (
        BOTH,
        TEXTS,
        "    both = Both(args.train_files, args.val_files)\n    held = both.second\n"
        "    train(model, both.first, optimizer)\n",
    ),
    "texts by one class": (
        "\nclass Text:\n    def __init__(self, files):\n        self.tokens = read_shards(files)\n",
        TEXTS,
        "    first, second = Text(args.train_files), Text(args.val_files)\n    held = second.tokens\n"
        "    for block in first.tokens.split(1025):\n        model(block[:-1], block[1:]).backward()\n"
        "        optimizer.step()\n",
    ),
    "a default of another scope": (
        learnt("net, opt, t=TEXT", "t.split(9)", more="\nTEXT = read_shards('fineweb_train_0.bin')\n"),
        WEIGHTS,
        "    TEXT = 'fineweb_val_0.bin'\n    learn(model, optimizer)\n" + WEIGHTS,
    ),
    "a step that need not learn": (
        STEP,
        "    print(adapt",
        "    with torch.no_grad():\n        print(step_of(scored, held, False))\n    print(adapt",
    ),
    "a probability of at most 1": ("", COSTS, COSTS + "; print((-costs).exp().clamp(0.0, 1.0).mean())"),
    "sums that are added up otherwise": ("", "nats += costs.sum()", "nats = nats + costs.sum()"),
    "a mixture of whole distributions, and a report of calibration": (
        MIX,
        WEIGHTS,
        "    print(calibration_error(model, held))\n" + WEIGHTS,
    ),
    "a probe while training": (
        "",
        "    train(model, Stream(args.train_files), optimizer)\n",
        "    for step in range(20):\n" + PROBE + "        train(model, Stream(args.train_files), optimizer)\n",
    ),
    "sums that a helper returns": (
        PRICE,
        LEGAL[LEGAL.index(COSTS) : LEGAL.index("        for epoch in range(3)")],
        SUMS,
    ),
    "other names": ("", "held", "val_tokens"),
}


def signs(tmp_path: Path, script: str) -> set[str]:
    compile(script, "script", "exec")
    found = review(write_submission(tmp_path / "a", None, script)).findings
    return {one.rule for one in found if one.rule.startswith("code")}


def changed(more: str, old: str, new: str) -> str:
    assert old in LEGAL
    return LEGAL.replace(old, new) + more


@pytest.mark.parametrize("case", CHEATS)
def test_illegal_scoring_is_found_whatever_its_names(case: str, tmp_path: Path) -> None:
    *change, rule = CHEATS[case]
    assert signs(tmp_path, changed(*change)) >= {f"code-{rule}"}


@pytest.mark.parametrize("case", HONEST)
def test_legal_scoring_has_no_sign_whatever_its_names(case: str, tmp_path: Path) -> None:
    assert signs(tmp_path, changed(*HONEST[case])) == set()


@pytest.mark.parametrize(
    ("reads", "file"),
    [
        ('json.load(open("prior.json"))', "prior.json"),
        ('torch.load("prior")', "prior"),
        ('torch.load(os.path.join("sub", "prior.npz"))', "sub/prior.npz"),
        ('[torch.load(f"prior_{i}.npz") for i in range(2)]', "prior_0.npz"),
        ('torch.load("logits.npz")', "logits.npz"),
        ('torch.load("submission.pt")', "submission.pt"),
    ],
)
def test_data_in_the_folder_counts_however_it_is_named(reads: str, file: str, tmp_path: Path) -> None:
    script = LEGAL + f"\n\nPRIOR = {reads}\n"
    found = review(write_submission(tmp_path / "a", None, script, files={file: b"1" * 4_000_000})).findings
    said = next(one.sentence for one in found if one.rule == "code-hidden")
    assert said.endswith(f"{file}, whose 4,000,000 bytes count too")
    unnamed = review(write_submission(tmp_path / "b", None, LEGAL, files={"tokenizer.model": b"1" * 100, file: b"1"}))
    assert not {one.rule for one in unnamed.findings} & {"code-hidden"}


def test_a_script_hidden_in_another_file_is_found_and_counts_as_code(tmp_path: Path) -> None:
    hidden = base64.b85encode(lzma.compress(LEGAL.encode())).decode()
    script = "from pathlib import Path\nexec(decode(Path(__file__).with_name('README.md').read_text()))\n"
    long = "Mean 1.1011; seeds 1.1001, 1.1011, 1.1021.\n" + hidden + "x" * 1_000_000
    result = review(write_submission(tmp_path / "a", None, script, files={"README.md": long}))
    assert "over the cap" in next(one.sentence for one in result.findings if one.rule == "size-script")
    assert "README.md" in next(one.sentence for one in result.findings if one.rule == "code-hidden")


def test_a_function_is_looked_through_once_however_often_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    need = review_code._need_gradients
    monkeypatch.setattr(review_code, "_need_gradients", lambda scope: looked.append(scope.name) or need(scope))
    calls = "    step_of(model, held, True)\n" * 50
    signs(tmp_path, changed(STEP, WEIGHTS, "    with torch.no_grad():\n    " + calls.replace("\n", "\n    ") + WEIGHTS))
    assert sorted(looked) == sorted(set(looked))
