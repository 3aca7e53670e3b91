"""The adapter for lm-evaluation-harness: its figures are those of caddie's own scorer."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TinyRun, call

from caddie.errors import UserError
from caddie.inference.sample import sample
from caddie.pack.artifact import load
from caddie.score.score import Text, score

pytestmark = [
    pytest.mark.skipif(not find_spec("lm_eval"), reason="pip install '.[lm-eval]'"),
    pytest.mark.filterwarnings("ignore"),  # of the harness and its many libraries
    pytest.mark.long,
]
TASK = """
task: held_out_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
"""


@dataclass
class Request:
    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def model(tiny_run: TinyRun) -> Any:
    from caddie.share.lm_eval_model import CaddieLM

    return CaddieLM(str(tiny_run.folder), device="cpu", batch_size=3)


def test_rows_at_once_are_at_least_one(tiny_run: TinyRun) -> None:
    from caddie.share.lm_eval_model import CaddieLM

    with pytest.raises(UserError, match="batch_size or max_batch_size must be at least 1, not 0"):
        CaddieLM(str(tiny_run.folder), device="cpu", batch_size="0")


def nats(tiny_run: TinyRun, text: str) -> float:
    """The loss of a text of one document by caddie's own scorer."""
    artifact = load(tiny_run.artifact)
    tokens = np.array([artifact.tokenizer.bos, *artifact.tokenizer.encode(text.encode())], np.uint16)
    size = len(text.encode())
    return score(artifact.model, Text(tokens, artifact.tokenizer.bos, size, size, size), artifact.scoring).nats


@pytest.mark.parametrize("length", [32, 33, 48, 49, 100, 701])
def test_a_text_costs_what_the_scorer_says(tiny_run: TinyRun, model: Any, length: int) -> None:
    text = tiny_run.text.read_text()[:length]
    found = model.loglikelihood_rolling([Request((text,)), Request(("ab",)), Request(("",)), Request((text * 2,))])
    assert found[0] == pytest.approx(-nats(tiny_run, text), abs=1e-3)
    assert found[3] == pytest.approx(-nats(tiny_run, text * 2), abs=1e-3)
    assert found[2] == 0.0


def test_a_continuation_has_its_share_of_the_text(tiny_run: TinyRun, model: Any) -> None:
    text = tiny_run.text.read_text()[:30]
    pairs = [("", text), (text[:12], text[12:]), (text[:20], text[20:])]
    whole, behind, end = (value for value, _ in model.loglikelihood([Request(pair) for pair in pairs]))
    assert whole == pytest.approx(model.loglikelihood_rolling([Request((text,))])[0], abs=1e-4)
    first = model.loglikelihood([Request(("", text[:12]))])[0][0]
    assert whole == pytest.approx(first + behind, abs=1e-4)
    assert whole < behind < end


def test_a_long_context_is_cut_at_its_beginning(tiny_run: TinyRun, model: Any) -> None:
    text = tiny_run.text.read_text()
    near, far = model.loglikelihood([Request((text[100:200], "abc")), Request((text[:200], "abc"))])
    assert near == far


def test_the_likeliest_continuation_is_told(tiny_run: TinyRun, model: Any) -> None:
    artifact = load(tiny_run.artifact)
    with torch.inference_mode():
        likeliest = int(artifact.model(torch.tensor([[256, 97]]), torch.tensor([[True, False]]))[0, -1, :128].argmax())
    others = [chr(one) for one in (likeliest, (likeliest + 1) % 128)]
    found = model.loglikelihood([Request(("a", one)) for one in others])
    assert found[0][0] > found[1][0]
    assert not found[1][1]


def test_it_writes_what_caddie_samples_up_to_a_stop(tiny_run: TinyRun, model: Any) -> None:
    artifact = load(tiny_run.artifact)
    own = sample(artifact, "abc", 40, temperature=0)[3:].decode("utf-8", "replace")
    (text,) = model.generate_until([Request(("abc", {"until": [""], "max_gen_toks": 40}))])
    assert text == own
    stop = text[len(text) // 2]
    (short,) = model.generate_until([Request(("abc", {"until": [stop, "never there"], "max_gen_toks": 40}))])
    assert short == own[: own.index(stop)]
    whole = text[len(text) // 2 :][:3]  # one stop, which may come as a text
    (short,) = model.generate_until([Request(("abc", {"until": whole, "max_gen_toks": 40}))])
    assert short == own[: own.index(whole)]


def test_a_task_of_local_data_gives_the_scorers_bits(tiny_run: TinyRun, tmp_path: Path) -> None:
    """By the verb, in a process of its own: the harness keeps its own logging and caches."""
    texts = tiny_run.text.read_text().split("\n\n")[:3]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "held_out.yaml").write_text(TASK.replace("FILE", str(tmp_path / "texts.jsonl")))
    options = ["--tasks", "held_out_text", "--include_path", "tasks", "--output_path", "out", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "caddie", "lm-eval", str(tiny_run.folder), *options],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(path.read_text())["results"]["held_out_text"]
    bits = sum(nats(tiny_run, text) for text in texts) / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte,none"] == pytest.approx(bits, abs=1e-6)


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    ended = call("lm-eval", tmp_path / "none", "--tasks", "wikitext")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "No such file" in ended.err
