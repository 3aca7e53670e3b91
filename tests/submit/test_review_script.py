"""What the review reads in a script without running it: packed sources, new syntax, and signs of illegal scoring."""

import ast
import base64
import json
import lzma
import random
import time
import zlib
from pathlib import Path

import brotli
import pytest
from submission_folder import SCRIPT, write_submission

from caddie.pack import source_bundle
from caddie.recipes.catalog import find
from caddie.submit.review import Review, review
from caddie.submit.review_script import blank_f_strings


def code_rules(result: Review) -> set[str]:
    return {one.rule for one in result.findings if one.rule.startswith(("code", "held-out"))}


def signs(tmp_path: Path, script: str, **files: str) -> set[str]:
    named = {name.replace("__", "."): text for name, text in files.items()}
    return code_rules(review(write_submission(tmp_path / "a", None, script, files=named)))


PREQUANT = SCRIPT.replace(
    "def main",
    """def prequant(model, val_data, optimizer):
    for epoch in range(21):
        for start in range(100):
            x = val_data.val_tokens[start : start + 8]
            model(x).backward()
            optimizer.step()


def main""",
).replace("    eval_val_ttt(model", "    prequant(model, val_tokens, optimizer)\n    eval_val_ttt(model")

GUARDED = SCRIPT.replace(
    "def main",
    """def train_on_prefix(model, val_tokens, optimizer):
    for start in range(100):
        model(val_tokens[start : start + 8]).backward()
        optimizer.step()


def eval_phased(model, val_tokens, optimizer):
    byte_sum = 0
    for start in range(100):
        with torch.no_grad():
            byte_sum += model(val_tokens[start])
    train_on_prefix(model, val_tokens, optimizer)
    return byte_sum


def main""",
)

SLOT = """
def eval_slot(model, val_tokens, optimizer):
    byte_count = 0
    for window in range(100):
        x = val_tokens[window : window + 8]
        for step in range(24):
            model(x).backward()
            optimizer.step()
        with torch.no_grad():
            byte_count += model(x)
    return byte_count
"""

MIXTURE = """
def mix(model, counts, val_tokens, alpha):
    x, y = val_tokens[:-1], val_tokens[1:]
    p = torch.exp(-F.cross_entropy(model(x), y, reduction="none"))
    return (1.0 - alpha) * p + alpha * counts[y]
"""

CALIBRATION = """
def export(model, val_tokens):
    flat = val_tokens.reshape(-1)
    chunks = [flat[i * 8 : i * 8 + 8] for i in range(4)]
    return collect_awq_scales(model, chunks)


def collect_awq_scales(model, chunks):
    handles = [layer.register_forward_hook(note) for layer in model.modules()]
    for chunk in chunks:
        model(chunk)
"""

LOADER = """
def export(model, args):
    calib_loader = DistributedTokenLoader(args.val_files)
    return collect_hessians(model, calib_loader)


def collect_hessians(model, loader):
    handles = [layer.register_forward_hook(note) for layer in model.modules()]
    for _ in range(64):
        model(loader.next_batch())
"""

SPACES = """
def build_luts(pieces, base_bytes):
    for place, piece in enumerate(pieces):
        base_bytes[place] = len(piece[1:].encode("utf-8")) + 1


def score(base_bytes, has_leading_space, is_boundary, target, before):
    return base_bytes[target] + (has_leading_space[target] & ~is_boundary[before])
"""

HINTS = """
import os
within_boost = float(os.environ.get("WITHIN_BOOST", "0.75"))
"""

AGAIN = """

@torch.no_grad()
def eval_again(model, val_tokens):
    model.eval()
    byte_count = 0
    byte_count += model(val_tokens[0])
"""

SIGNS = {
    "legal": (SCRIPT, set()),
    "a caller that scores first": (GUARDED, set()),
    "before quantization": (PREQUANT, {"code-trains-on-validation"}),
    "slot": (SLOT, {"code-update-first"}),
    "scored again": (
        SCRIPT.replace(
            "    eval_val_ttt(model, val_tokens, optimizer)\n",
            "    eval_val_ttt(model, val_tokens, optimizer)\n    eval_again(model, val_tokens)\n",
        )
        + AGAIN,
        {"code-rescoring"},
    ),
    "another model scores": (
        SCRIPT.replace(
            "    eval_val_ttt(model, val_tokens, optimizer)\n",
            "    eval_val_ttt(model, val_tokens, optimizer)\n    eval_again(other_model, val_tokens)\n",
        )
        + AGAIN,
        set(),
    ),
    "a caller that scores afterwards": (
        GUARDED.replace("    byte_sum = 0\n", "    byte_sum = 0\n    train_on_prefix(model, val_tokens, optimizer)\n"),
        {"code-trains-on-validation"},
    ),
    "mixture": (MIXTURE, {"code-mixture"}),
    "a mixture of whole distributions": (MIXTURE.replace("counts[y]", "counts"), set()),
    "calibration": (CALIBRATION, {"code-calibration"}),
    "calibration on training text": (CALIBRATION.replace("val_tokens", "train_tokens"), set()),
    "calibration by a loader": (LOADER, {"code-calibration"}),
    "calibration by a loader of training text": (LOADER.replace("val_files", "train_files"), set()),
    "space counted twice": (SPACES, {"code-bytes"}),
    "space counted while scoring": (SPACES.replace(" + 1\n", "\n"), set()),
    "space counted in the table": (SPACES.replace("has_leading_space[target] & ~is_boundary[before]", "0"), set()),
    "hints": (HINTS, {"code-target-hints"}),
    "no hints": (HINTS.replace("0.75", "0.0"), set()),
    "hints of a number that is no float": ("within_boost = 0x" + "f" * 5000, set()),
    "a line of stars": (
        "import argparse\nprint('*' * 80)\nprint('*', flush=True)\nx = op == '*'\n"
        "argparse.ArgumentParser().add_argument('x', nargs='*')\n",
        set(),
    ),
    "any file": ("from pathlib import Path\nfiles = Path('data').glob('*')\n", {"code-training-files"}),
    "a version that is looked up": ("from importlib.metadata import version\nprint(version('torch'))\n", set()),
    "any module": ("import importlib.metadata\nimportlib.import_module(input())\n", {"code-hidden"}),
    "network": ("from huggingface_hub import hf_hub_download\n", {"code-network"}),
    "shell": (
        "import subprocess\nsubprocess.run(['pip', 'install x'])\nsubprocess.run('wget x', shell=True)\n",
        {"code-network"},
    ),
    "nvidia-smi": ("import subprocess\nsubprocess.run(['nvidia-smi'])\n", set()),
}


@pytest.mark.parametrize("case", SIGNS)
def test_signs_of_illegal_scoring(case: str, tmp_path: Path) -> None:
    script, wanted = SIGNS[case]
    assert signs(tmp_path, script) == wanted


def test_hints_that_the_logs_switch_off_are_none(tmp_path: Path) -> None:
    off = {"  matrix_lr: 0.02": "  within_boost: 0.0"}
    assert not code_rules(review(write_submission(tmp_path / "a", None, HINTS, off)))


def test_modules_that_the_script_names_are_read_and_others_are_not(tmp_path: Path) -> None:
    assert signs(tmp_path, "import helper\n", helper__py="import requests\n") == {"code-network"}
    assert signs(tmp_path, "import other\n", helper__py="import requests\n") == set()


def test_a_preparation_that_holds_out_too_few_documents(tmp_path: Path) -> None:
    text = 'import argparse\nargparse.ArgumentParser().add_argument("--val-docs", type=int, default={})\n'
    assert signs(tmp_path, SCRIPT, prepare_data__py=text.format("10_000")) == {"held-out-default"}
    assert signs(tmp_path, SCRIPT, prepare_data__py=text.format("50_000")) == set()


def test_every_preparation_is_checked(tmp_path: Path) -> None:
    text = 'import argparse\nargparse.ArgumentParser().add_argument(\n    "--val-docs", type=int, default=10_000)\n'
    other = text.replace('"--val-docs"', '"--val-docs")\nadd_argument("-x"')
    files = {f"prepare_{place}.py": text if place == "l" else other for place in "abcdefghijkl"}
    result = review(write_submission(tmp_path / "a", files=files))
    found = [(one.file, one.line) for one in result.findings if one.rule == "held-out-default"]
    assert found == [("prepare_l.py", 3)]


RAW = [{"id": lzma.FILTER_LZMA2}]


def packed(data: bytes, decode: str) -> str:
    """Return a script that decodes and runs `data`."""
    text = (base64.b64encode if "64" in decode else base64.b85encode)(data).decode()
    return f"import base64, brotli, lzma, zlib\nexec({decode}({text!r})))"


LZMA = packed(lzma.compress(SLOT.encode()), "lzma.decompress(base64.b85decode")
PACKED = {
    "lzma": LZMA,
    "raw lzma": packed(lzma.compress(SLOT.encode(), lzma.FORMAT_RAW, filters=RAW), "L.decompress(base64.b85decode"),
    "zlib": packed(zlib.compress(SLOT.encode()), "zlib.decompress(base64.b64decode"),
    "brotli": packed(brotli.compress(SLOT.encode()), "brotli.decompress(base64.b85decode"),
    "twice": packed(zlib.compress(LZMA.encode()), "zlib.decompress(base64.b85decode"),
}


@pytest.mark.parametrize("codec", PACKED)
def test_a_packed_script_is_read_without_being_run(codec: str, tmp_path: Path) -> None:
    result = review(write_submission(tmp_path / "a", None, PACKED[codec]))
    one = next(one for one in result.findings if one.rule == "code-update-first")
    assert "unpacked" in one.sentence
    assert SLOT.splitlines()[(one.line or 0) - 1].strip() == "model(x).backward()"


@pytest.mark.parametrize("codec", PACKED)
def test_code_around_a_packed_script_is_read_as_well(codec: str, tmp_path: Path) -> None:
    """It may change the packed source, or unpack it and run something else."""
    said = "code around its packed source does more than unpack and run it: read it"

    def hidden(script: str, name: str) -> bool:
        found = review(write_submission(tmp_path / name, None, script)).findings
        return any(one.rule == "code-hidden" and one.sentence == said for one in found)

    assert not hidden(PACKED[codec], "a")
    assert hidden(PACKED[codec][:-1] + ".replace(b'pass', b'model(x).backward()'))", "b")
    decoy = PACKED["lzma"].replace("exec(", "_ = base64.b85decode if 0 else (")
    assert hidden(f"{decoy}\nexec('')", "c")


def test_the_script_of_a_submission_is_known_to_the_byte(tmp_path: Path) -> None:
    """`caddie submit` wrote it; a change of its program, or of the code around it, is to be read."""
    ours = source_bundle.script(find("tiny").to_json()).decode()

    def hidden(script: str, name: str) -> bool:
        found = review(write_submission(tmp_path / name, None, script)).findings
        return any(one.rule == "code-hidden" for one in found)

    assert not hidden(ours, "a")
    settings = ours.replace('"depth": ', '"depth": 1')
    assert settings != ours
    assert not hidden(settings, "b"), "another recipe"
    assert hidden(ours.replace("sys.path.insert(0, folder)", "sys.path.insert(0, 'mine')"), "c")
    beside = write_submission(tmp_path / "beside", None, ours, files={"brotli.so": "x" * 2000})
    told = [(one.rule, one.file) for one in review(beside).findings if one.rule.startswith("code")]
    assert ("code-hidden", "brotli.so") in told, "what it imports is looked for beside it first"
    before, begin, source = ours.partition('SOURCE = "')
    packed, end, after = source.partition('"')
    files = json.loads(brotli.decompress(base64.b85decode(packed)))
    files["caddie/score/loop.py"] += "\nnats = lambda *_: 0\n"
    other = base64.b85encode(brotli.compress(json.dumps(files).encode())).decode()
    assert hidden(f"{before}{begin}{other}{end}{after}", "d")
    for name, broken in (("e", "[1, 2]"), ("f", "{"), ("g", "[" * 50_000)):
        head, mark, rest = ours.partition("RECIPE = json.loads(r'''")
        assert hidden(head + mark + broken + "''')" + rest.partition("''')")[2], name)


def test_what_a_packed_string_would_hide_is_found(tmp_path: Path) -> None:
    honest = base64.b85encode(lzma.compress(random.Random(0).randbytes(4000))).decode()
    decoy = f"import base64, lzma\nABOUT = base64.b85decode if 0 else {honest!r}\n"
    assert "code-update-first" in signs(tmp_path, decoy + SLOT)


@pytest.mark.parametrize(
    "script",
    [
        PACKED["lzma"].replace("b85decode('", "b85decode('~~"),
        packed(b"\0" * 1000, "lzma.decompress(base64.b85decode"),
        "def f(:\n",
        "x = " + "(" * 100_000,
        "x = " + "-" * 100_000 + "1",
        "x" + ".a" * 100_000,
        "f'" + "{" * 100_000,
        "import base64\nname = '\\ud800'\nbase64.b64decode(name)\n",
    ],
    ids=["broken", "zeros", "syntax", "brackets", "signs", "attributes", "braces", "surrogate"],
)
def test_a_script_that_cannot_be_read_is_no_error(script: str, tmp_path: Path) -> None:
    start = time.monotonic()
    result = review(write_submission(tmp_path / "a", None, script))
    assert time.monotonic() - start < 20
    assert {one.severity for one in result.findings if one.rule == "code-unread"} <= {"note"}
    warned = [one.sentence for one in result.findings if one.rule == "code-syntax"]
    assert all(one.startswith(("it is not Python", "it is nested too deeply")) for one in warned)
    assert not [one for one in result.findings if one.severity == "error"]


def test_a_script_that_is_not_python_is_worth_a_warning(tmp_path: Path) -> None:
    result = review(write_submission(tmp_path / "a", None, "def f(:\n"))
    assert [one.severity for one in result.findings if one.rule == "code-syntax"] == ["warning"]


def test_what_unpacks_to_much_is_not_unpacked(tmp_path: Path) -> None:
    bomb = packed(zlib.compress(b"x = 1\n" * 5_000_000), "zlib.decompress(base64.b85decode")
    assert "code-unread" in signs(tmp_path, bomb)


def test_f_strings_of_newer_pythons_are_blanked_and_keep_their_lines() -> None:
    """PEP 701: quotes inside an f-string like its own, to any depth."""
    new = 'a = 1\nb = f"{d["x"]} {f"{e["y"]:>{w}}"} {{}}"\nc = f"""{\nd["z"]}"""'
    new += "\nx = \"f\" + '#' # it's\n# f\"{\nval = 2\n"
    tree = ast.parse(blank_f_strings(new))
    names = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    assert names == ["a", "b", "c", "x", "val"]
    assert [node.lineno for node in tree.body] == [1, 2, 3, 5, 7]
    assert blank_f_strings(SLOT) == SLOT


def test_new_f_strings_do_not_hide_a_sign(tmp_path: Path) -> None:
    assert signs(tmp_path, 'x = {"a": 1}\ny = f"{x["a"]}"\n' + SLOT) == {"code-update-first"}


LONG = {
    "loops": "def f(val_tokens):\n" + " for x in y: val_tokens[0]; a.backward(); byte_sum += 1\n" * 7_000,
    "calls": SCRIPT + "\ndef again(model, val_tokens):\n" + " eval_val_ttt(model, val_tokens, o)\n" * 12_000,
    "functions": "def f(model): g(model)\n" * 10_000,
    "deep": "def ngram(a):\n return (1 - a) * p + a" + ".b" * 900 + " * q\n",
    "blends": "def ngram(a):\n" + " x = (1 - a) * p + a * q\n" * 9_000,
}


LENGTHY = ("loops", "calls", "blends", "functions")  # in seconds


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in LENGTHY)) for kind in LONG])
def test_long_scripts_are_read_in_bounded_time(kind: str, tmp_path: Path) -> None:
    assert len(LONG[kind]) < 500_000
    start = time.monotonic()
    review(write_submission(tmp_path / "a", None, LONG[kind]))
    assert time.monotonic() - start < 20
