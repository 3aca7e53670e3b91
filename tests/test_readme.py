"""The Python of docs/python.md, run as it stands but for the time it trains."""

import re
import shutil
from pathlib import Path

import pytest

import caddie

ROOT = Path(__file__).resolve().parent.parent
QUICK = (
    '"train.seconds": 0.2, "pack.fit": None, "pack.coding": "Packed", "pack.calibration.tokens": 1024, '
    '"model.embedding.bigrams.buckets": 512, "model.width": 32, "model.depth": 2, "train.batch_tokens": 1024, '
    '"train.sequence_length": 256, "train.warmup_steps": 2, "train.precision": "float32", '
    '"score.sequence_length": 256, "score.stride": 128'
)
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), flags=re.DOTALL)


@pytest.mark.long
def test_the_program_is_twelve_lines_and_scores_alike_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_process: None,
    unprobed: None,
) -> None:
    monkeypatch.setattr(
        "caddie.run.run.check_settings_matter", lambda recipe: None
    )  # the shipped recipes' settings act
    monkeypatch.setattr("caddie.run.result.sample", lambda artifact: b"")  # the program asks for one itself
    program = BLOCKS[0]
    assert len(program.strip().splitlines()) == 12
    assert '"train.seconds": 20' in program
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for path in (ROOT / "caddie").rglob("[ab]*.py"):
        shutil.copy(path, tmp_path / "my_texts" / f"{path.stem}.txt")
    names: dict[str, object] = {}
    exec(compile(program.replace('"train.seconds": 20', QUICK), "python.md", "exec"), names)
    exec(compile(BLOCKS[1], "python.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    first, again = float(printed[0].split()[0]), float(printed[1])
    assert first < 7
    assert again == pytest.approx(first, abs=1e-6)
    assert printed[2].startswith("def ")
    assert printed[-1].startswith("torch.Size([1, ")


def test_the_recipe_of_ones_own_is_a_diff_on_its_base(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[2])
    recipe = caddie.find(f"{tmp_path / 'mine.py'}:late_focus")
    assert recipe.name == "late_focus"
    changed = caddie.find("baseline_mini").settings.diff(recipe.settings)
    assert list(changed) == ["model.layers.0-1"]
