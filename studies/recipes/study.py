"""All recipes side by side: their twins for two cores, in equal time.

Records that differ in how they are scored alone have one twin; it stands here once, under the first one's name. Public
scores are those of the whole recipes, on eight GPUs; what is asked here is which order small models give.
"""

from __future__ import annotations

from caddie.lab.study import BASE, Entry, Seconds, Study
from caddie.pack.calibrate import TrainingText
from caddie.pack.coding import EntropyModel, Packed
from caddie.recipes.catalog import find, shipped
from caddie.recipes.recipe import Recipe

SMALLEST = {"tiny", "small"}
"""Recipes that are of this size as they are, for other texts than the contest's."""
LATER = {"asymmetric_softcap", "longer_rows", "growing_rows", "finer_corrections", "ngram_tilt"}
LATER |= {"mudd", "last_layer_mudd", "signed_bigrams"}
"""Recipes that came after the study, and what is based on them."""
THEN = {
    "longer_warmdown": ("best_record", "The best record, 1.0611: gentler gates, slower Adam, longer warmdown."),
    "few_layers": ("champion", shipped()["few_layers"].why),
}
"""Name and reason that a recipe had then, where it has others now."""


def twin(name: str) -> Recipe:
    """The twin of a recipe as it is trained and scored here."""
    recipe = find(f"{name}_mini")
    diff = {"data.validation_fraction": 0.01, "score.stride": recipe.score.sequence_length}
    if isinstance(recipe.pack.coding, EntropyModel) and recipe.pack.correction is not None:
        diff = {**diff, "pack.coding": Packed(shuffle=True)}  # theirs when rows were made; bytes alone differ
    return recipe.but({**diff, "pack.calibration": TrainingText()})  # also where the recipe's own writes its text


base = twin("baseline")
different: dict[str, str] = {base.settings.key(): BASE}
for name in shipped():
    if name not in SMALLEST | LATER and shipped()[name].base not in LATER:
        different.setdefault(twin(name).settings.key(), name)

study = Study(
    name="recipes",
    why="Which recipe learns most in half a minute of one thread?",
    base=base,
    entries={
        label: Entry(diff=base.settings.diff(twin(name).settings), kind="bundle", why=why)
        for name in different.values()
        if name != BASE
        for label, why in [THEN.get(name, (name, shipped()[name].why))]
    },
    budget=Seconds(seconds=30),
    margin=0.001,
)
