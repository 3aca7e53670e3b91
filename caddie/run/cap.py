"""The bytes that a recipe leaves its file: the cap, less the code that its policy counts beside the file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from caddie.pack.artifact import Metadata
from caddie.pack.source_bundle import describe_source
from caddie.recipes.recipe import Recipe
from caddie.run.policy import FileCap, code_bytes, file_cap, section_bytes


def cap_of_recipe(recipe: Recipe, parts: Mapping[str, int] = MappingProxyType({})) -> FileCap:
    """Return the bytes that the file of a recipe may have; `parts` are those of its sections, as far as known.

    Raises `UserError` if the code takes the whole cap.
    """
    source = describe_source(recipe.to_json()) if recipe.pack.policy else {}
    return file_cap(recipe.pack, code_bytes(source), parts)


def cap_of_run(recipe: Recipe, metadata: Metadata) -> FileCap:
    """Return the bytes that a file of a recipe with this metadata may have."""
    return cap_of_recipe(recipe, section_bytes(metadata))
