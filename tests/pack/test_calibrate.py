"""What calibration says of a weight, against brute force on models small enough for it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pretended_gpu import GPU, pretended_gpu
from processes import together
from recording import RecordedProgress
from safetensors.torch import load_file, save_file
from samples import noisy
from torch import Tensor

from caddie.errors import UserError
from caddie.model import GPT, ChannelSmear, HashedNGrams, Linear, Model, Recurrence, TokenEmbedding, UntiedHead, build
from caddie.model.parameters import FanIn
from caddie.pack.calibrate import SelfGenerated, TrainingText, calibrate, predicted_loss
from caddie.pack.coding import Packed
from caddie.pack.compress import Pack, compress
from caddie.pack.quantize import Calibration, Gptq, Quantizer, Rows, Waterfilling
from caddie.runtime.distributed import Ranks

BOS = 0
SMALL = GPT(vocabulary=16, width=8, depth=2).but(
    {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "block.mlp.hidden": 12}
)
LOOPED = SMALL.but(
    {
        "recurrence": Recurrence(first=0, last=1, passes=2),
        "block.mlp.linear.normed": True,
        "embedding.dims": 6,
        "head.softcap": None,
    }
)


def small(config: GPT = SMALL) -> Model:
    """A model whose weights are all at work."""
    return noisy(build(config, 0), 0.3)


def some(rows: int, length: int, number: int, vocabulary: int = 16) -> list[Tensor]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(vocabulary, (rows, length), generator=chance) for _ in range(number)]


def test_the_predicted_loss_by_hand() -> None:
    weight, restored = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    columns = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    rows = torch.tensor([0.5, 1.0])
    assert predicted_loss(Calibration(), weight, restored) == 0.5 * (1 + 4)
    assert predicted_loss(Calibration(columns=columns), weight, restored) == 0.5 * (2 + 4 * 3)
    assert predicted_loss(Calibration(rows=rows, columns=columns), weight, restored) == 0.5 * (0.5 * 2 + 4 * 3)
    assert predicted_loss(Calibration(rows=rows), torch.zeros(2), torch.tensor([2.0, 1.0])) == 0.5 * (0.5 * 4 + 1)


@pytest.mark.parametrize("config", [SMALL.but({"head.softcap": None}), LOOPED])
def test_inputs_are_those_of_every_use(config: GPT) -> None:
    """W H W^T is the mean of y y^T over all outputs y = W x, whatever a module does to x first."""
    model, batches = small(config), some(2, 7, 3)
    found = calibrate(model, batches, bos=BOS)
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, given, output: outputs.setdefault(name, []).append(output.detach().flatten(0, -2))

    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(keep(f"{name}.weight"))
    model.head.register_forward_hook(keep("embedding.weight"))
    for ids in batches:
        model(ids, ids == BOS)
    weights = dict(model.named_parameters())
    assert {name for name in found if found[name].inputs is not None} == set(outputs)
    for name, pieces in outputs.items():
        y, inputs, weight = torch.cat(pieces), found[name].inputs, weights[name]
        assert inputs is not None
        torch.testing.assert_close(weight @ inputs @ weight.T, y.T @ y / len(y), rtol=1e-4, atol=1e-4, msg=name)
    runs = 4 if config is LOOPED else 2
    assert sum(len(pieces) for name, pieces in outputs.items() if "mlp.up" in name) == 3 * runs


def test_the_table_of_an_untied_head_survives_gptq() -> None:
    model = small(SMALL.but({"head": UntiedHead()}))
    found = calibrate(model, some(2, 7, 3), bos=BOS)
    weight, gptq = model.get_parameter("head.table.weight").detach(), Gptq(of=Rows(bits=8))
    restored = gptq.dequantize(gptq.quantize(weight, found["head.table.weight"]), tuple(weight.shape))
    assert (restored - weight).norm() < 0.02 * weight.norm()
    assert found["head.table.weight"].inputs is not None
    assert found["embedding.weight"].inputs is None


def test_a_layer_that_is_never_called_has_no_inputs() -> None:
    model = small()
    model.register_module("idle", Linear(4, 3, FanIn()))
    assert calibrate(model, some(1, 7, 2), bos=BOS)["idle.weight"].inputs is None


@pytest.mark.slow
def test_the_sum_of_squares_is_the_trace_of_the_fisher_information() -> None:
    """By brute force: F = Σ J^T (diag(p) - p p^T) J over positions, J the Jacobian of their logits."""
    model = small()
    ids = some(1, 5, 1)[0]
    names = ["blocks.0.attention.key.weight", "blocks.0.mlp_scale", "blocks.1.mlp.down.weight", "embedding.weight"]
    found = calibrate(model, [ids] * 300, bos=BOS)
    assert set(found) == {name for name, _ in model.named_parameters()}
    weights = dict(model.named_parameters())
    logits = model(ids, ids == BOS)[0]
    odds = logits.softmax(-1).detach()
    chosen = [weights[name] for name in names]
    by_logit = [torch.autograd.grad(logit, chosen, retain_graph=True) for logit in logits.flatten()]
    hessians = torch.stack([torch.diag(p) - p[:, None] * p for p in odds])
    for name, gradients in zip(names, zip(*by_logit, strict=True), strict=True):
        weight = weights[name]
        jacobian = torch.stack(gradients).view(*logits.shape, -1)
        exact = torch.einsum("tvi,tvw,twi->i", jacobian, hessians, jacobian) / 5
        by_row = exact.view(len(weight), -1).mean(1)
        rows = found[name].rows
        assert rows is not None
        torch.testing.assert_close(rows.sum(), by_row.sum(), rtol=0.1, atol=0.0, msg=name)
        assert np.corrcoef(rows, by_row)[0, 1] > 0.95, name


@pytest.mark.long
def test_small_errors_cost_what_is_predicted() -> None:
    """The divergence of the perturbed predictions, for noise and for noise that the factors say is cheap."""
    config = SMALL.but(embedding=TokenEmbedding(bigrams=HashedNGrams(buckets=24, dims=5)))
    model, batches = small(config), some(1, 16, 96)
    found = calibrate(model, batches, bos=BOS)
    text = torch.cat(batches[:32])
    with torch.no_grad():
        before = model(text, text == BOS).double().log_softmax(-1)
    chance = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        calibration, weight = found[name], parameter.detach().clone()
        assert (calibration.columns is not None) == (weight.ndim == 2), name
        ratios = []
        for shaped in (False, True) if weight.ndim == 2 else (False,):  # a vector has no columns to follow
            costs, predictions = 0.0, 0.0
            for _ in range(4):
                noise = 0.01 * torch.randn(weight.shape, generator=chance)
                if shaped and calibration.columns is not None:
                    values, vectors = torch.linalg.eigh(calibration.columns)
                    noise = noise @ vectors * values.clamp_min(0.03).rsqrt() @ vectors.T
                with torch.no_grad():
                    parameter.copy_(weight + noise)
                    after = model(text, text == BOS).double().log_softmax(-1)
                    parameter.copy_(weight)
                costs += float((before.exp() * (before - after)).sum(-1).mean())
                predictions += predicted_loss(calibration, weight, weight + noise)
            ratios.append(predictions / costs)
        assert all(0.6 < ratio < 1.5 for ratio in ratios), (name, ratios)


def test_rows_that_were_never_seen_are_not_free() -> None:
    config = SMALL.but({"head": UntiedHead()})
    batches = [ids.clamp_max(9) for ids in some(1, 16, 8)]
    rows = calibrate(small(config), batches, bos=BOS)["embedding.weight"].rows
    assert rows is not None
    assert 0.0 < rows[10:].max() < rows[:10].min()
    torch.testing.assert_close(rows[10:], rows[10].expand(6))


def test_the_model_is_left_as_it_is_and_autocast_changes_nothing() -> None:
    model = small().requires_grad_(False)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    batches = some(1, 8, 3)
    found = calibrate(model, batches, bos=BOS)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.enable_grad():
        again = calibrate(model, batches, bos=BOS)
    for name, calibration in found.items():
        assert_same(calibration, again[name])
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_tokens_are_counted() -> None:
    progress = RecordedProgress()
    calibrate(small(), some(1, 8, 9), bos=BOS, progress=progress)
    told = [(event["done"], event["total"]) for event in progress.events]
    assert told == [(8 * number, 88) for number in range(1, 12)], "two of nine are run through first"


def tensors(found: dict[str, Calibration]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, calibration in found.items()
        for key, value in vars(calibration).items()
        if value is not None
    }


def assert_same(one: Calibration, other: Calibration) -> None:
    for key, value in vars(one).items():
        if value is None:
            assert vars(other)[key] is None
        else:
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, vars(other)[key], rtol=1e-4, atol=1e-7)


def share(ranks: Ranks, folder: Path) -> None:
    """What one of two processes does."""
    found = calibrate(small(), some(1, 8, 16)[ranks.rank :: 2], bos=BOS, ranks=ranks)
    save_file(tensors(found), folder / f"{ranks.rank}.safetensors")


@pytest.mark.long
def test_two_processes_are_one_with_all_batches(tmp_path: Path) -> None:
    together(share, 2, tmp_path)
    alone = tensors(calibrate(small(), some(1, 8, 16), bos=BOS))
    for rank in range(2):
        shared = load_file(tmp_path / f"{rank}.safetensors")
        assert set(shared) == set(alone)
        for name, value in alone.items():
            torch.testing.assert_close(shared[name], value, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("quantizer", [Waterfilling(), Gptq(of=Rows(bits=6))], ids=str)
def test_what_a_gpu_found_serves_the_cpu(quantizer: Quantizer) -> None:
    model, ids, plan = (
        small(LOOPED),
        some(1, 6, 2),
        Pack(fit=None, coding=Packed()).but({"quantizers.matrix": quantizer}),
    )
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = compress(LOOPED, weights, plan, calibrate(model, ids, bos=BOS)).candidate.predicted_loss
    with pretended_gpu():
        model.to(GPU)
        found = compress(LOOPED, weights, plan, calibrate(model, [rows.to(GPU) for rows in ids], bos=BOS))
    assert next(model.parameters()).device.index is None, "no longer pretended"
    assert found.candidate.predicted_loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.long
def test_what_mixes_devices_is_found() -> None:
    with pretended_gpu():
        here, there = torch.ones(2, device=GPU), torch.ones(2)
        assert (here.device, there.device, (2 * here).device) == (GPU, torch.device("cpu"), GPU)
        assert torch.equal(here.cpu() + there, (here + there.to(GPU)).cpu())
        with pytest.raises(AssertionError, match="mixes devices"):
            here + there
        with pytest.raises(AssertionError, match="NumPy"):
            here.numpy()


def test_training_text_is_shared_by_the_processes() -> None:
    shard = np.arange(1000, dtype=np.uint16)
    model, text = small(), TrainingText(tokens=64, batch_tokens=16)
    alone = list(text.batches(model, [shard], length=8, bos=BOS))
    assert [tuple(ids.shape) for ids in alone] == [(2, 8)] * 4
    for ids in alone:
        assert torch.equal(ids - ids[:, :1], torch.arange(8).expand(2, 8)), "rows of consecutive tokens"
    ranked = [list(text.batches(model, [shard], length=8, bos=BOS, ranks=Ranks(rank, 2))) for rank in range(2)]
    for number, ids in enumerate(alone):
        assert torch.equal(ids, ranked[number % 2][number // 2])


def test_little_training_text_has_small_batches() -> None:
    """A batch larger than the text would end a run after its training."""
    text = TrainingText(tokens=10_000, batch_tokens=4096)
    batches = list(text.batches(small(), [np.arange(1000, dtype=np.uint16)], length=8, bos=BOS))
    assert [tuple(ids.shape) for ids in batches] == [(124, 8)] * 10


@pytest.mark.parametrize("text", [TrainingText, SelfGenerated])
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_no_generator_takes_are_a_mistake(text: type[TrainingText | SelfGenerated], seed: int) -> None:
    """They would end a run after its training."""
    with pytest.raises(UserError, match="seed must be from 0 to 4,294,967,295"):
        text(seed=seed)


def test_a_calibration_text_without_tokens_is_a_mistake() -> None:
    with pytest.raises(UserError, match="yields no tokens; it must yield at least one row"):
        calibrate(small(), [], bos=BOS)


def test_self_generated_text_is_the_models_own() -> None:
    """At a temperature near zero each token is the likeliest after those before it, which a full forward says too."""
    config = SMALL.but({"embedding.smear": ChannelSmear()})
    model = small(config)
    cold = SelfGenerated(sequences=12, batch=6, temperature=0.0)
    rows = list(cold.batches(model, [], length=9, bos=BOS))
    assert [tuple(ids.shape) for ids in rows] == [(6, 9)] * 2
    for ids in rows:
        assert torch.equal(model(ids, ids == BOS)[:, :-1].argmax(-1), ids[:, 1:])
    warm = SelfGenerated(sequences=64, batch=64)
    (one,), (same,) = (list(warm.batches(model, [], length=4, bos=BOS)) for _ in range(2))
    assert torch.equal(one, same)
    assert len(set(one[:, 0].tolist())) > 12, "the first token is drawn from the whole vocabulary"
    (other,) = warm.but(seed=1).batches(model, [], length=4, bos=BOS)
    assert not torch.equal(one, other)
