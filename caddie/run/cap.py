"""Bytes that a recipe's file may have: the cap, less counted code outside the file, plus parts that do not count."""

from typing import Any

from caddie.config.userfile import UserFile, user_files
from caddie.errors import UserError
from caddie.pack.artifact import Metadata
from caddie.pack.source_bundle import describe_source, with_parts
from caddie.recipes.recipe import Recipe
from caddie.run.policy import FileCap, code_bytes, file_cap, section_bytes


def cap_of_recipe(recipe: Recipe, metadata: Metadata | None = None) -> FileCap:
    """Return the bytes that the file of a recipe may have; `metadata` is the file without its weights.

    Raises `UserError` if code or metadata take the whole cap.
    """
    source = source_of_recipe(recipe) if recipe.pack.policy else {}
    found = file_cap(recipe.pack, code_bytes(source), section_bytes(metadata) if metadata else {})
    if metadata and (least := metadata.file_bytes({}, ())) >= found.file_bytes:
        raise UserError(
            f"tokenizer and settings alone take {least:,} of the {found.file_bytes:,} bytes that the file may have; "
            "give a larger cap, as cap=1000000"
        )
    return found


def source_of_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return `source` of a recipe's `result.json`: facts on caddie's code and on the users' files that it needs."""
    needed, training = ([file.source for file in files] for files in (files_to_score(recipe), user_files(recipe)))
    return with_parts(describe_source(recipe.to_json()), needed, training)


def files_to_score(recipe: Recipe) -> tuple[UserFile, ...]:
    """Return the users' files that the artifact of a recipe needs."""
    dequantizers = [quantizer.dequantizer for quantizer in recipe.pack.quantizers.values()]
    return user_files(recipe.model, recipe.score, *dequantizers)
