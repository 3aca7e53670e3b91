"""Rotation, low-rank correction, ternary and binary groups, eight-bit floats, pruning of ones; what recipes store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import SYSTEMS, facts, matches, tensors
from samples import quick, restored, sample
from script_names import NAMES
from torch import Tensor

from caddie.errors import UserError
from caddie.model.parameters import assign
from caddie.pack.compress import Correction
from caddie.pack.fit import without_ones
from caddie.pack.quantize import (
    Binary,
    Calibration,
    Float8,
    Float16,
    Float32,
    Gptq,
    LowRank,
    Percentile,
    Protected,
    Protection,
    Quantizer,
    Rotated,
    Rows,
    SigmaClip,
    Ternary,
)
from caddie.pack.quantize.quantizer import Arrays
from caddie.pack.quantize.rotated import rotated
from caddie.recipes.catalog import shipped

often = settings(quick, max_examples=40)


@pytest.fixture(scope="module")
def folder(parity: Path) -> Path:
    return parity / "components" / "quantisation"


# Rotation


@pytest.mark.parametrize(("columns", "block"), [(1, 1), (2, 2), (8, 8), (12, 4), (7, 1), (96, 32)])
def test_the_rotation_is_a_block_diagonal_hadamard_matrix(columns: int, block: int) -> None:
    from scipy.linalg import block_diag, hadamard  # which take a while to import

    expected = block_diag(*[hadamard(block) / block**0.5] * (columns // block))
    found = rotated(torch.eye(columns)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    values = sample(3, 5, columns)
    np.testing.assert_allclose(rotated(values).numpy(), values.numpy() @ expected, atol=1e-5)
    torch.testing.assert_close(rotated(rotated(values)), values)


def test_an_outlier_is_spread_over_its_row() -> None:
    weight = 0.1 * sample(8, 64)
    weight[:, 5] = 10.0
    quantizer = Rows(bits=4)
    assert (restored(Rotated(of=quantizer), weight) - weight).norm() < 0.7 * (
        restored(quantizer, weight) - weight
    ).norm()


def test_calibration_is_turned_with_the_weight() -> None:
    weight, x = sample(16, 48), sample(200, 48, seed=1) @ sample(48, 48, seed=2)
    inputs = x.T @ x / 200
    turned = rotated(weight)
    quantizer = Gptq(of=Rows(bits=4))
    expected = quantizer.quantize(turned, Calibration(inputs=rotated(x).T @ rotated(x) / 200))
    told = Rotated(of=quantizer).quantize(weight, Calibration(inputs=inputs))
    assert (told["integers"] == expected["integers"]).mean() > 0.99
    losses = [
        float((((back - weight) @ inputs) * (back - weight)).sum())
        for back in (
            restored(Rotated(of=quantizer), weight, known) for known in (Calibration(inputs=inputs), Calibration())
        )
    ]
    assert losses[0] < 0.7 * losses[1]


# Low-rank correction


def test_a_correction_of_low_rank_takes_back_what_all_rows_share() -> None:
    rank_two = sample(24, 2) @ sample(2, 64, seed=1)
    weight = rank_two + 0.01 * sample(24, 64, seed=2)
    coarse = Rows(bits=2)
    plain = float((restored(coarse, weight) - weight).norm())
    for form in ("asymmetric", "symmetric"):
        corrected = float((restored(LowRank(of=coarse, rank=4).but(form=form), weight) - weight).norm())
        assert corrected < 0.95 * plain, form


def test_the_forms_and_what_they_take() -> None:
    shapes = {name: shape for name, (_, shape) in LowRank().layout((10, 32)).items()}
    assert shapes["left"] == (10, 4)
    assert shapes["right"] == (4, 32)
    assert (shapes["left_steps"], shapes["right_steps"]) == ((1,), (2,))
    odd = {name: shape for name, (_, shape) in LowRank().layout((10, 33)).items()}
    assert (odd["left_steps"], odd["right_steps"]) == ((10,), (4,)), "132 is no multiple of 64"
    arrays = LowRank(of=Rows(bits=3)).quantize(sample(40, 32))
    assert (arrays["left"].min(), arrays["left"].max()) in [(-2, 1), (-1, 1), (-2, 0)]
    assert arrays["right"].min() >= -8
    assert arrays["right"].max() <= 7
    symmetric = LowRank(of=Rows(bits=3), form="symmetric").quantize(sample(40, 32))
    assert np.array_equal(np.abs(symmetric["right"]).max(1), [7] * 4)
    assert np.array_equal(np.abs(symmetric["left"]).max(1), [7] * 40)


def test_factors_are_packed_as_in_the_record(folder: Path) -> None:
    golden = tensors(folder / "lqer")
    for match in matches(golden, r"pack_only\.(asym|sym)(\d+)\.qA"):
        grouped = match[1] == "asym"
        quantizer = LowRank(group=int(match[2])) if grouped else LowRank()
        arrays = quantizer.pack(golden["pack_only.A"], golden["pack_only.B"], grouped)
        for ours, theirs in (("left", "qA"), ("left_steps", "sA"), ("right", "qB"), ("right_steps", "sB")):
            assert arrays[ours].tobytes() == golden[match[0].removesuffix("qA") + theirs].numpy().tobytes()


def protected_cases(
    frontier: Path,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Gptq], dict[str, Calibration]]:
    config, golden = facts(frontier / "config")["awq"], tensors(frontier / "awq_lqer")
    quantizers, calibrations = {}, {}
    for name in config["matrices"]:
        embedding = name.startswith("tok_emb")
        part = next((part for part in ("mlp", "attn") if f".{part}." in name), "embed" if embedding else "other")
        bits = config["embed_bits"] if embedding else config["matrix_bits"]
        quantizers[name] = Gptq(of=Rows(bits=bits, scale=SigmaClip(k=config[f"k_{part}"])))
        calibrations[name] = Calibration(inputs=golden[f"H.{name}"])
    return config, golden, quantizers, calibrations


def test_protected_columns_are_chosen_as_in_the_record(frontier: Path) -> None:
    config, golden, quantizers, _ = protected_cases(frontier)
    # the script's means are of all its batches, so they come as they are
    means = {name: Calibration(inputs=torch.diag(golden[f"rms.{name}"].square())) for name in quantizers}
    weights = {name: golden[f"w.{name}"].float() for name in quantizers}
    protection = Protection(columns=config["group"])
    found = protection.ranked(weights, quantizers, means)
    groups = [(name, one.start, one.columns) for _, name, one in found]
    assert groups == [(name, start, config["group"]) for _, name, start, _ in config["candidates"]]
    for (ours, *_), (score, *_) in zip(found, config["candidates"], strict=True):
        assert ours == pytest.approx(score, rel=1e-5, abs=1e-6)  # six digits were kept
    for groups in (1, 2):
        chosen = protection.but(groups=groups).protected(weights, quantizers, means)
        assert (
            {name: one.start for name, one in chosen.items()}
            == {  # type: ignore[attr-defined]
                name: start for _, name, start, _ in config["candidates"][:groups]
            }
        )


STORED = {
    "q": "integers",
    "scale": "steps",
    "awqg_s_hi": "fine_steps",
    **dict.fromkeys(("lqA", "lqA_a"), "left"),
    **dict.fromkeys(("lqAs", "lqAs_a"), "left_steps"),
    **dict.fromkeys(("lqB", "lqB_a"), "right"),
    **dict.fromkeys(("lqBs", "lqBs_a"), "right_steps"),
}
"""End of a tensor's name in the script's files to our array."""


def signed_as(factors: Mapping[str, np.ndarray], sides: tuple[Tensor, Tensor], quantizer: LowRank) -> Arrays:
    """Pack A and B again with the script's signs: a singular vector may have either."""
    left, right = sides
    given = torch.from_numpy(factors["right"].astype(np.float32))
    signs = (given * right).sum(1).sign()
    return quantizer.pack(left * signs, right * signs[:, None], quantizer._grouped((len(left), right.shape[1])))


def test_every_tensor_of_the_later_records_packing_is_ours(frontier: Path) -> None:
    """Choice of columns and of corrections, integers, steps and errors of each variant; names read from the files."""
    config, golden, plain, calibrations = protected_cases(frontier)
    weights = {name: golden[f"w.{name}"].float() for name in plain}
    means = {name: Calibration(inputs=torch.diag(golden[f"rms.{name}"].square())) for name in plain}
    compared = {key for key in golden if key.startswith(("w.", "H.", "rms."))}  # what goes in
    for variant, case in config["variants"].items():
        changes, quantizers = dict(case["changes"]), dict(plain)
        if changes.pop("awq_lite_enabled", False):
            protection = Protection(columns=config["group"], groups=changes.pop("awq_lite_group_top_k", 1))
            quantizers |= protection.protected(weights, quantizers, means)
        arrays = {name: quantizer.quantize(weights[name], calibrations[name]) for name, quantizer in quantizers.items()}
        back = {name: quantizers[name].dequantize(arrays[name], tuple(weights[name].shape)) for name in arrays}
        correction = Correction(
            matrices=changes.pop("lqer_top_k", 3),
            rank=changes.pop("lqer_rank", 4),
            group=changes.pop("lqer_asym_group", 64),
            choice="gain" if changes.pop("lqer_gain_select", False) else "error",
            pattern=f"*.{scope}.*" if (scope := changes.pop("lqer_scope", "all")) != "all" else "*",
        )
        assert not changes, "a change that the test does not know"
        corrections = correction.corrected(weights, back, quantizers)
        for name, weight in weights.items():
            described = f"gptq (int{plain[name].of.bits})" + "+awqgrpint8" * isinstance(quantizers[name], Protected)
            if low_rank := cast(LowRank, corrections.get(name)):
                described += "+lqer" + "_asym" * low_rank._grouped(tuple(weight.shape))
            assert case["meta"][name] == described, (variant, name)
            stored = {end: f"{variant}/{name}.{end}" for end in (*STORED, "awqg_start", "awqg_size")}
            stored = {end: case.get("same_as", {}).get(f"{name}.{end}", key) for end, key in stored.items()}
            stored = {end: key for end, key in stored.items() if key in golden}
            compared |= set(stored.values())
            found = dict(arrays[name])
            if low_rank:
                # of the error of their integers: one that is rounded otherwise moves the factors
                theirs = {STORED[end]: golden[key].numpy() for end, key in stored.items() if STORED.get(end) in found}
                error = weight - quantizers[name].dequantize(theirs, tuple(weight.shape))
                u, s, vt = torch.linalg.svd(error, full_matrices=False)
                sides = u[:, : low_rank.rank] * s[: low_rank.rank], vt[: low_rank.rank]
                (right,) = (golden[key] for end, key in stored.items() if end in ("lqB", "lqB_a"))
                found |= signed_as({"right": right.numpy()}, sides, low_rank)
                back[name] = back[name] + low_rank.product(found)
            if isinstance(protected := quantizers[name], Protected):
                assert (int(golden[stored.pop("awqg_start")]), int(golden[stored.pop("awqg_size")])) == (
                    protected.start,
                    protected.columns,
                )
            assert {STORED[end] for end in stored} == set(found), (variant, name)
            for end, key in stored.items():
                ours, expected = found[STORED[end]], golden[key].numpy()
                assert ours.dtype == expected.dtype
                different = ours.astype(np.float64).ravel() - expected.astype(np.float64).ravel()
                if ours.dtype == np.int8:
                    assert (different != 0).mean() <= 1e-3, key
                    assert np.abs(different).max() <= 1, key
                else:
                    near = 1e-3 if end.startswith("lq") else 0.0  # half precision's
                    assert np.abs(different).max() <= near * np.abs(expected.astype(np.float64)).max(), key
            assert float((back[name] - weight).norm()) == pytest.approx(case["error"][name], rel=1e-3), (variant, name)
            floats = [golden.get(f"{variant}/{name}.{side}_float") for side in "AB"]
            if low_rank and floats[0] is not None and floats[1] is not None:
                compared |= {f"{variant}/{name}.{side}_float" for side in "AB"}
                product = sides[0] @ sides[1]
                assert (floats[0] @ floats[1] - product).norm() < 1e-3 * product.norm()
                grouped = low_rank._grouped(tuple(weight.shape))
                for part, array in low_rank.pack(floats[0], floats[1], grouped).items():
                    key = next(key for end, key in stored.items() if STORED[end] == part)
                    assert array.tobytes() == golden[key].numpy().tobytes(), key
    assert compared == set(golden)


def test_protected_columns_cannot_be_packed() -> None:
    with pytest.raises(UserError, match="two widths"):
        Protected(of=Gptq(of=Rows(bits=6, packed=True)))


CLIPS = {"tok_emb": (14.0, 7), "mlp": (11.5, 6), "attn": (13.0, 6), "": (12.85, 6)}
"""Part of a matrix's name to the script's clip, in standard deviations of a row, and bits."""


def test_weights_are_those_that_the_best_record_loads(folder: Path) -> None:
    golden = tensors(folder / "lqer")
    weights = {match[1]: golden[f"W.{match[1]}"] for match in matches(golden, r"H\.(.+)")}
    recorded = facts(folder / "info")["lqer"]
    (match,) = matches(recorded, r"kept \d+ of")
    kept = recorded[match[0]]
    left, *_ = matches(golden, r".+\.stored\..+\.lqA(?:_a)?")
    sizes = {"rank": golden[left[0]].shape[1]}
    if grouped := [name for name in golden if name.endswith(".lqB_a")]:
        sizes["group"] = golden[grouped[0]].numel() // golden[grouped[0].replace("lqB_a", "lqBs_a")].numel()
    errors, plain = {}, {}
    for name, weight in weights.items():
        k, bits = next(clip for part, clip in CLIPS.items() if part in name)
        plain[name] = Gptq(of=Rows(bits=bits, scale=SigmaClip(k=k)))
        back = restored(plain[name], weight, Calibration(inputs=golden[f"H.{name}"]))
        errors[name] = float((back - weight).norm())
        assert errors[name] == pytest.approx(kept[name], rel=1e-3)
    for case in {match[1] for match in matches(golden, r"(a?sym_top\d+)\.stored\..+")}:
        corrected = sorted(errors, key=errors.__getitem__)[-int(case.partition("top")[2]) :]
        for name, weight in weights.items():
            quantizer: Quantizer = plain[name]
            if name in corrected:
                quantizer = LowRank(
                    of=plain[name], form="symmetric" if case.startswith("sym") else "asymmetric", **sizes
                )
            arrays = quantizer.quantize(weight, Calibration(inputs=golden[f"H.{name}"]))
            assert (arrays["integers"] == golden[f"{case}.stored.{name}.q"].numpy()).mean() >= 0.995
            loaded = golden[f"{case}.loaded.{name}"]
            back = quantizer.dequantize(arrays, tuple(weight.shape))
            assert (back - loaded).norm() < 0.01 * (loaded - weight).norm(), (case, name)


def test_gates_are_the_rows_of_the_best_record(folder: Path) -> None:
    golden = tensors(folder / "lqer")
    gate = shipped()["longer_warmdown"].pack.quantizers["gate"]
    stored = matches(golden, r"((?:a?sym_top\d+)\.stored\.(.+)\.)gq")
    for weight, integers, steps in (
        ("gate_int8.W", "gate_int8.q", "gate_int8.scale"),
        *((f"W.{match[2]}", match[0], f"{match[1]}gs") for match in stored),
    ):
        arrays = gate.quantize(golden[weight])
        assert arrays["integers"].tobytes() == golden[integers].numpy().tobytes()
        used = arrays["integers"].any(1)  # a row of zeros has a step there too, but 0
        assert np.array_equal(arrays["steps"][used], golden[steps].numpy()[used])
        assert used.sum() >= len(used) // 2


# Groups


def test_trits_by_hand() -> None:
    weight = torch.tensor([[1.0, -0.2, 0.3, -2.5, 0.0, 4.0]])  # groups of four: means 1 and (0 + 4) / 4
    arrays = Ternary(group=4).quantize(weight)
    assert arrays["integers"].tolist() == [[1, 0, 0, -1, 0, 1]]
    assert arrays["steps"].tolist() == [1.0, 1.0]
    assert restored(Ternary(group=4), weight).tolist() == [[1, 0, 0, -1, 0, 1]]
    assert restored(Ternary(group=4, keep_mean=True), weight).tolist() == [[2, 0, 0, -2, 0, 4]]
    packed = Ternary(group=4, packed=True).quantize(weight)["packed"]  # digits 2, 1, 1, 0, 1 and 2, 1, 1
    assert packed.tolist() == [2 + 3 + 9 + 0 + 81, 2 + 3 + 9]


def test_the_mean_survives_and_errors_are_smaller_where_it_is_kept() -> None:
    weight = sample(16, 256)
    plain, kept = restored(Ternary(), weight), restored(Ternary(keep_mean=True), weight)
    assert plain.abs().mean() < 0.75 * weight.abs().mean()
    torch.testing.assert_close(kept.abs().mean(), weight.abs().mean(), rtol=1e-3, atol=0)
    assert (kept - weight).norm() < (plain - weight).norm()


def test_signs_by_hand() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5], [0.0, 0.0, 0.0, -0.5]])
    arrays = Binary(group=3).quantize(weight)
    assert arrays["steps"].tolist() == [2.0, 0.5, 0.0, 0.5], "the last group of a row is smaller"
    assert arrays["packed"].tolist() == [0b0111_1101]
    assert restored(Binary(group=3), weight).tolist() == [[2, -2, 2, 0.5], [0, 0, 0, -0.5]]


def test_trits_are_those_of_the_ternary_record(folder: Path) -> None:
    golden = tensors(folder / "ternary")
    for match in matches(golden, r"(group(\d+)\.standard\.(.+))\.packed"):
        case, group, name = match[1], int(match[2]), match[3]
        weight, quantizer = golden[f"W.{name}"], Ternary(group=group, keep_mean=True, packed=True)
        arrays = quantizer.quantize(weight)
        assert arrays["packed"].tobytes() == golden[f"{case}.packed"].numpy().tobytes()
        assert arrays["steps"].tobytes() == golden[f"{case}.scale"].numpy().tobytes()
        assert torch.equal(quantizer.dequantize(arrays, tuple(weight.shape)), golden[f"{case}.loaded"])
        trits = golden[f"{case}.trits_by_group"].reshape(len(weight), -1)[:, : weight.shape[1]].numpy()
        assert np.array_equal(Ternary(group=group).quantize(weight)["integers"], trits)


def test_what_training_sees_is_that_of_the_ternary_record(folder: Path) -> None:
    golden = tensors(folder / "ternary")
    seen, theirs = (
        Ternary().fake(golden["training_forward.weight"]),
        golden["training_forward.effective_weight_bf16_as_float"],
    )
    # theirs has 8 bits, in which what is near half a step may be rounded to the other side
    steps = golden["training_forward.weight"].unflatten(1, (-1, Ternary().group)).abs().mean(2, keepdim=True)
    halves = golden["training_forward.weight"].unflatten(1, (-1, Ternary().group)).abs() / steps
    clear = ((halves - 0.5).abs() > 2**-7).flatten(1)
    assert clear.float().mean() > 0.95
    assert torch.equal(seen[clear].sign(), theirs[clear].sign())
    torch.testing.assert_close(seen[clear], theirs[clear], rtol=2**-5, atol=0)


def test_other_weights_are_those_of_the_ternary_record(folder: Path) -> None:
    golden = tensors(folder / "ternary")
    compared = set()
    for match in matches(golden, r"(group\d+\.standard\.(.+))\.loaded"):
        weight = golden[f"W.{match[2]}"]
        if f"{match[1]}.packed" not in golden:
            quantizer = Float16() if weight.ndim == 1 else Float8()
            assert torch.equal(restored(quantizer, weight), golden[match[0]]), match[0]
            compared.add(weight.ndim)
    assert compared == {1, 2}


# Eight-bit floats


def test_eight_bit_floats_are_all_the_numbers_they_should_be() -> None:
    every = torch.tensor([e for e in range(256) if e & 127 != 127], dtype=torch.uint8)
    values = Float8().dequantize({"values": every.numpy()}, (254,))
    exponents, mantissas = (every >> 3) & 15, every & 7
    expected = torch.where(
        exponents > 0, (1 + mantissas / 8) * 2.0 ** (exponents.float() - 7), mantissas / 8 * 2.0**-6
    ) * torch.where(every > 127, -1.0, 1.0)
    assert torch.equal(values, expected)
    assert values.max() == 448
    assert torch.equal(Float8().fake(values), values)


# Pruning


@often
@given(st.integers(0, 1000), st.integers(0, 60))
def test_as_many_go_as_are_asked_for_and_no_dearer_one(seed: int, count: int) -> None:
    quantizer = Rows(bits=3, scale=SigmaClip(k=3.0))
    tensors = {
        f"{n}": quantizer.quantize(sample(n, 5, seed=seed) * sample(n, 1, seed=seed + 1).abs()) for n in (1, 4, 2)
    }
    found = without_ones(tensors, count)
    kept_steps, gone_steps = [], []
    for name, arrays in tensors.items():
        steps = np.broadcast_to(arrays["steps"][:, None], arrays["integers"].shape)
        gone = found[name]["integers"] != arrays["integers"]
        ones = np.abs(arrays["integers"]) == 1
        assert not (gone & ~ones).any()
        assert not found[name]["integers"][gone].any()
        kept_steps += steps[ones & ~gone].tolist()
        gone_steps += steps[gone].tolist()
    assert len(gone_steps) == min(count, len(gone_steps) + len(kept_steps))
    assert max(gone_steps, default=0) <= min(kept_steps, default=np.inf)


# What the recipes store


def stored_as(quantizer: Quantizer) -> str:
    """The scripts' words for a quantizer."""
    if isinstance(quantizer, LowRank):  # "three of the gptq matrices additionally receive a low-rank correction"
        quantizer = quantizer.of
    if isinstance(quantizer, Gptq):
        return f"gptq (int{quantizer.of.bits})"
    if isinstance(quantizer, Rows):
        return "gate_int8_row" if quantizer.scale == Percentile(fraction=1.0) else f"int{quantizer.bits} row"
    return {Float16: "float16", Float32: "float32"}[type(quantizer)]  # type: ignore[index]


@pytest.mark.parametrize(("script", "name"), [*SYSTEMS.items()])
def test_every_tensor_is_stored_as_in_the_script(folder: Path, script: str, name: str) -> None:
    decisions = facts(folder / "storage_decisions_full_recipes")[script]["per tensor"]
    with torch.device("meta"):
        model = shipped()[name].model.build()
    chosen = assign(shipped()[name].pack.quantizers, model, "rules")
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in model.named_parameters()}
    seen = set()
    for decision in decisions:
        pattern = decision["name pattern"]
        if pattern.startswith("ve_layer_scales."):  # one vector here
            parameters = ["value_embedding.layer_scales"]
        elif pattern.startswith("blocks.*."):
            ours = NAMES[pattern.removeprefix("blocks.*.")]
            parameters = [p for p in chosen if p.startswith("blocks.") and p.split(".", 2)[2] == ours]
            assert len(parameters) == decision["count"], pattern
        else:
            parameters = [NAMES[pattern]]
        expected = (
            decision["stored as"].removeprefix("passthrough (").removesuffix(")" * ("pass" in decision["stored as"]))
        )
        if script in ("S000", "ARG"):  # written without calibration: its rows are GPTQ's where there is some
            expected = expected.replace("int6 row", "gptq (int6)")
        for parameter in parameters:
            found = stored_as(chosen[parameter])
            assert found == expected.replace("one scale", "row"), parameter
            if not pattern.startswith("ve_layer") and shapes[parameter]:
                assert list(shapes[parameter]) == decision["shape"], parameter
        seen |= set(parameters)
    assert seen >= {p for p in chosen if p != "embedding.bigrams.scale"}
