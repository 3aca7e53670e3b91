"""The benches of lattices and trellises: errors by theory, and a table of what trellises save."""

import gaussian_source as gaussian
import numpy as np
import pytest
import trellis


def test_e8_is_as_good_at_high_rate_as_published() -> None:
    """Second moments for each dimension: 0.07168 of E8, whose cells have a volume of 1, for a twelfth."""
    source = np.random.default_rng(0).uniform(-40, 40, (80, 1000)).astype(np.float32)
    bits, error = gaussian.e8_of_source(source, 1.0)
    assert error == pytest.approx(0.07168, rel=0.01)
    assert bits == pytest.approx(np.log2(80), rel=0.02)


def test_a_trellis_is_between_rounding_and_theory() -> None:
    source = np.random.default_rng(0).standard_normal(64 * 200).astype(np.float32)
    bits, error = gaussian.trellis_of_source(source, 0.5, 8, True)
    plain = [gaussian.plain_of_source(source, step) for step in (0.4, 0.5, 0.6)][::-1]
    theirs = np.interp(bits, *np.array([(each, 10 * np.log10(loss)) for each, loss in plain]).T)
    assert 1.0 < theirs - 10 * np.log10(error) < theirs + 20 * np.log10(2) * bits


def row(way: str, bits: float, loss: float) -> dict[str, object]:
    fields = {"gap": loss, "divergence": loss, "predicted": loss}
    return {"run": "toy", "way": way, "parameters": 8000, "bytes": 1000 * bits, **fields}


def test_the_table_has_each_way_at_each_rate_that_its_steps_reach() -> None:
    """Losses fall by four a bit, so a loss of 0.8 of plain rounding's is worth log4(1 / 0.8) bits."""
    bits = (1.0, 2.0, 4.0)
    ways = {"plain": 1.0, "ours": 0.8, "worse": 2.0}
    rows = [row(way, each, factor * 4.0**-each) for way, factor in ways.items() for each in bits]
    lines = [line.split() for line in trellis.summary(rows, (2.0, 3.0, 5.0)).splitlines()]
    found = {(line[1], line[2]): line[-3:] for line in lines if line and line[0] == "toy"}
    assert set(found) == {(rate, way) for rate in ("2", "3") for way in ways}
    for rate in ("2", "3"):
        assert found[rate, "plain"][:2] == ["1.000", "1.000"]
        assert found[rate, "ours"][0] == found[rate, "ours"][1] == "0.800"
        assert float(found[rate, "ours"][2]) == pytest.approx(np.log(1 / 0.8) / np.log(4), abs=0.05)
        assert float(found[rate, "worse"][2]) == pytest.approx(-0.5, abs=0.05)
