"""The names of `import caddie`, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import caddie

CALLS = """
import caddie
for name in ("run", "score", "verify"):
    for _ in range(2):  # the first use imports the folder of that name, which must not take the function's place
        try:
            getattr(caddie, name)(no_such_argument=0)
        except TypeError as error:
            assert "no_such_argument" in str(error), error
"""


@pytest.mark.parametrize("before", ["", "import caddie.run.policy, caddie.score.windows, caddie.verify.probes"])
def test_verbs_stay_callable_beside_the_folders_of_their_names(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{before}\n{CALLS}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in caddie.__all__:
        assert callable(getattr(caddie, name))
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = caddie.rum
