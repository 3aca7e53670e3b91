"""Publish a finished run on the Hugging Face hub, in one commit: artifact, result, page, recipe and model card."""

import hashlib
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caddie.config.userfile import read_stated
from caddie.data.hub import ABSENT, hub_library
from caddie.errors import UserError
from caddie.files import reason
from caddie.report.read import final_score, pick, read_regular, result_errors
from caddie.report.run_files import ARTIFACT, PARTS, RECIPE, REPORT, RESULT
from caddie.report.tables import markdown_table
from caddie.report.verification import describe_checks
from caddie.run.run_folder import read_finished
from caddie.share.pull import split_place

CARD = "README.md"
_MOST_BYTES = 1 << 32
_ADVICE = "check token, name and network; the same command tries again"
_FILES = {
    ARTIFACT: "weights, tokenizer and settings in one file; data alone, no pickle, nothing that is run",
    RESULT: "everything measured, with hashes",
    REPORT: "the same as a page",
    RECIPE: "every setting; `caddie run recipe.json --data TEXT` trains it again",
}
_CARD = """\
# {name}

A language model of {result[artifact_bytes]:,} bytes, trained and packed by caddie from the recipe `{result[recipe]}`. \
{result[why]}

{facts}

## Bytes

{parts}

## Check it

In a checkout of caddie (the `caddie` on PyPI is another project's):

```sh
pip install '.[hub]'
caddie verify {place}
caddie score {place} --data TEXT
caddie sample {place} --prompt "The "
```

TEXT is the text of the run, {result[corpus][name]}; a text that was not proven to be held out is refused.
Loading runs no code of this repository, and the file must have the SHA-256 that `result.json` states:
`{result[sha256][artifact]}`.

{own}## Files

{files}
"""


def push(
    run: Path, place: str, *, license_name: str | None = None, private: bool = False, bars: bool = False
) -> dict[str, Any]:
    """Upload a finished run to the repository `hf:USER/NAME`, which is made if it is missing; return what was done.

    All files are of one commit on `main`. Text files of the same name are replaced. The recipe goes without the path of
    its corpus. `license_name` is an identifier of the hub's, such as mit. Raises `UserError` for a run that is not
    finished, files that do not match its result, a missing token, and whatever the hub refuses.
    """
    repository, revision = split_place(place)
    if revision != "main":
        raise UserError(f"push goes to the branch main; leave out @{revision}")
    files = run_files(run)
    result = json.loads(files[RESULT])
    with (
        tempfile.TemporaryDirectory() as home,
        hub_library(Path(home), bars, f"to {repository}", ABSENT["model"], _ADVICE, doing="push") as library,
    ):
        if library.get_token() is None:
            raise UserError("pushing needs a token that may write: set HF_TOKEN, or log in by `hf auth login`")
        with result_errors(run / RESULT, "a model card"):
            data = card_data(library, result, repository, license_name)
            files[CARD] = f"---\n{data}\n---\n\n{card_text(result, repository, sorted(files))}".encode()
        client = library.HfApi()
        client.create_repo(repository, private=private or None, exist_ok=True)
        if private and not client.model_info(repository).private:  # it was there before
            raise UserError(f"{place} is public: make it private in its settings on the hub, or leave out --private")
        additions = [library.CommitOperationAdd(name, content) for name, content in sorted(files.items())]
        score = f"{result['bits_per_byte']:.4f} bits per byte"
        commit = client.create_commit(repository, additions, commit_message=f"{result['recipe']}: {score}")
    return {
        "repository": repository,
        "commit": commit.oid,
        "url": str(commit.commit_url),
        "files": {name: len(content) for name, content in sorted(files.items())},
    }


def run_files(run: Path) -> dict[str, bytes]:
    """Return path in the repository to content of a finished run; `UserError` if it is none or its files disagree.

    Links are not followed, and only `parts` that the recipe states are taken: somebody else may have made the folder.
    """
    _, about = read_finished(run)
    if not (run / REPORT).is_file():
        raise UserError(f"{run / REPORT} is missing; make it by: caddie report {shlex.quote(str(run))}")
    parts = {f"{PARTS}/{one.name}": one.sha256 for one in read_stated(pick(about, PARTS) or [])}
    files = {}
    for name in (ARTIFACT, RESULT, REPORT, *parts):
        try:
            files[name] = read_regular(run / name, _MOST_BYTES)
        except OSError as error:
            raise UserError(f"{run / name}: cannot be read ({reason(error)}); push a folder of your own") from None
        if name in parts and hashlib.sha256(files[name]).hexdigest() != parts[name]:
            raise UserError(f"{run / name} is not the file that {run / RECIPE} names; run the recipe again")
    files[RECIPE] = (json.dumps(about["recipe"], indent=1) + "\n").encode()
    return files


def card_data(library: Any, result: Mapping[str, Any], repository: str, license_name: str | None) -> str:
    """Return the YAML before a card's text, by `library`, huggingface_hub: tags, and the score for the hub's index."""
    kind, score = final_score(result)
    corpus = result["corpus"]
    scored = library.EvalResult(
        task_type="text-generation",
        dataset_type=pick(corpus, "origin", "repository") or corpus["name"],
        dataset_name=f"{corpus['name']}, held-out documents",
        dataset_revision=pick(corpus, "origin", "commit"),
        metric_type="bits_per_byte",
        metric_name=f"bits per byte, {kind}",
        metric_value=round(result["bits_per_byte"], 6),
        metric_args={"sequence_length": score["sequence_length"], "stride": score["stride"]},
    )
    data = library.ModelCardData(
        license=license_name,
        library_name="caddie",
        pipeline_tag="text-generation",
        tags=["caddie", "parameter-golf", result["recipe"]],
        metrics=["bits_per_byte"],
        model_name=repository.partition("/")[2],
        eval_results=[scored],
    )
    return str(data.to_yaml()).strip()


def card_text(result: Mapping[str, Any], repository: str, files: Sequence[str]) -> str:
    """Return the text of a card: the score with its text and windows, the bytes by part, and commands to check both."""
    kind, score = final_score(result)
    corpus, training = result["corpus"], result["training"]
    held_out = f"{corpus['documents']['validation']:,} documents, {corpus['source_bytes']['validation']:,} bytes"
    adaptive = f", test-time training {score['ttt']}" if score.get("ttt") else ""
    facts = [
        ("score", f"{result['bits_per_byte']:.5f} bits per byte"),
        ("kind", f"{kind}: windows of {score['sequence_length']:,} tokens, stride {score['stride']:,}{adaptive}"),
        ("text", f"{corpus['name']}: {held_out}, held out of training"),
        ("file", f"{result['artifact_bytes']:,} bytes; the cap is {result['cap_bytes']:,}"),
        ("checks", describe_checks(result)),
        ("parameters", f"{training['parameters']:,}"),
        ("training", f"{training['tokens']:,} tokens in {training['steps']:,} steps, on {result['device']}"),
        ("seed", result["seed"]),
        ("caddie", result["versions"]["caddie"]),
    ]
    parts = [(name, f"{size:,}") for name, size in result["ledger"]["parts"].items()]
    own = [f"`{name}`" for name in files if name.startswith(f"{PARTS}/")]
    return _CARD.format(
        name=repository.partition("/")[2],
        place=f"hf:{repository}",
        result=result,
        facts=markdown_table(("", ""), facts),
        parts=markdown_table(("part of the file", "bytes"), parts),
        own=f"The model has classes in {' and '.join(own)}: read them, and name them by `--parts`.\n\n" if own else "",
        files=markdown_table(("file", ""), [(f"`{name}`", said) for name, said in _FILES.items() if name in files]),
    )
