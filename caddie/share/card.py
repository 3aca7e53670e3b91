"""The model card of a published run: facts for the hub's index, and a page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from caddie.report.read import final_score
from caddie.report.run_files import ARTIFACT, PARTS, RECIPE, REPORT, RESULT
from caddie.report.tables import markdown_lines
from caddie.report.verification import describe_checks

_FILES = {
    ARTIFACT: "weights, tokenizer and settings in one file; data alone, no pickle, nothing that is run",
    RESULT: "everything measured, with hashes",
    REPORT: "the same as a page",
    RECIPE: "every setting; `caddie run recipe.json --data TEXT` trains it again",
}


def card_data(library: Any, result: Mapping[str, Any], repository: str, license_name: str | None) -> str:
    """Return the YAML before a card's text, by `library`, huggingface_hub: tags, and the score for the hub's index."""
    kind, score = final_score(result)
    corpus = result["corpus"]
    scored = library.EvalResult(
        task_type="text-generation",
        dataset_type=(corpus.get("origin") or {}).get("repository") or corpus["name"],
        dataset_name=f"{corpus['name']}, held-out documents",
        dataset_revision=(corpus.get("origin") or {}).get("commit"),
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
    """Return the text of a card: the score and what it is of, the bytes by part, and how to check both."""
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
    parts = result["ledger"]["parts"]
    own = [f"`{name}`" for name in files if name.startswith(f"{PARTS}/")]
    place = f"hf:{repository}"
    return "\n".join(
        [
            f"# {repository.partition('/')[2]}",
            "",
            f"A language model of {result['artifact_bytes']:,} bytes, trained and packed by caddie from the recipe "
            f"`{result['recipe']}`. {result['why']}",
            "",
            *markdown_lines(("", ""), facts),
            "",
            "## Bytes",
            "",
            *markdown_lines(("part of the file", "bytes"), [(name, f"{size:,}") for name, size in parts.items()]),
            "",
            "## Check it",
            "",
            "In a checkout of caddie (the `caddie` on PyPI is another project's):",
            "",
            "```sh",
            "pip install '.[hub]'",
            f"caddie verify {place}",
            f"caddie score {place} --data TEXT",
            f'caddie sample {place} --prompt "The "',
            "```",
            "",
            f"TEXT is the text of the run, {corpus['name']}; a text that was not proven to be held out is refused.",
            "Loading runs no code of this repository, and the file must have the SHA-256 that `result.json` states:",
            f"`{result['sha256']['artifact']}`.",
            "",
            *(
                [f"The model has classes in {' and '.join(own)}: read them, and name them by `--parts`.", ""]
                if own
                else []
            ),
            "## Files",
            "",
            *markdown_lines(("file", ""), [(f"`{name}`", text) for name, text in _FILES.items() if name in files]),
            "",
        ]
    )
