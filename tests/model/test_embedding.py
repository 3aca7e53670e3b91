"""Embeddings: hash, tables, smear, and the positions that none of them may read."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Golden, matches, recorded, tensors
from samples import noisy
from torch import Tensor

from caddie.errors import UserError
from caddie.model import ChannelSmear, Embedding, HashedNGrams, Smear, TokenEmbedding, TokenSmear
from caddie.model.context import Cache, Context
from caddie.model.embedding import TokenTable
from caddie.model.ngrams import buckets, ngrams, sign_rows
from caddie.model.parameters import declarations, initialize
from caddie.ops import rms_norm
from caddie.recipes.catalog import find

VOCABULARY, WIDTH = 48, 16
EVERYTHING = TokenEmbedding(
    bigrams=HashedNGrams(buckets=101), trigrams=HashedNGrams(buckets=103, dims=8), smear=ChannelSmear()
)
WAYS = {
    "bigrams": TokenEmbedding(bigrams=HashedNGrams(buckets=101)),
    "projected bigrams": TokenEmbedding(bigrams=HashedNGrams(buckets=101, dims=8)),
    "trigrams": TokenEmbedding(trigrams=HashedNGrams(buckets=101)),
    "signed bigrams": TokenEmbedding(bigrams=HashedNGrams(buckets=101, signs=16)),
    "channel smear": TokenEmbedding(smear=ChannelSmear()),
    "token smear": TokenEmbedding(smear=TokenSmear()),
    "everything": EVERYTHING,
    "everything, token smear": EVERYTHING.but(smear="TokenSmear"),
}
REACH = {"trigrams": 2, "everything": 3, "everything, token smear": 3}
"""Positions that each kind looks back, one by default. A smear adds one to its input's."""
every_way = pytest.mark.parametrize("way", WAYS)


def context(ids: Tensor, starts: Tensor | None = None, cache: Cache | None = None) -> Context:
    return Context(ids.long(), starts, torch.float32, cache)


def random_table(embedding: Embedding, seed: int = 1) -> TokenTable:
    """The module with no parameter at zero."""
    module = embedding.build(VOCABULARY, WIDTH)
    initialize(module, 0)
    return noisy(module, 1.0, seed)


def some_ids(rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def some_starts() -> Tensor:
    """Documents begin at 0, 7 and 8 in the first row and at 11 in the second, whose first document goes on."""
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[0, [0, 7, 8]] = True
    starts[1, 11] = True
    return starts


# The hash


def test_buckets_are_those_of_the_scripts(parity: Path) -> None:
    data = tensors(parity / "components" / "functions" / "functions")
    for match in matches(data, r"bigram\.buckets_(\d+)"):
        assert torch.equal(buckets(ngrams(context(data["bigram.tokens"]), 2), int(match[1])), data[match[0]]), match[0]


def test_products_wrap_around_and_three_tokens_have_a_third_factor(parity: Path) -> None:
    data = tensors(parity / "components" / "functions" / "functions")
    (name,) = matches(data, r"bigram\.tokens_above_\d+_int32_wraps")
    large = data[name[0]]
    assert (36_313 * large.long()).max() >= 1 << 31
    for match in matches(data, r"bigram\.wrapped_buckets_(\d+)"):
        assert torch.equal(buckets(ngrams(context(large), 2), int(match[1])), data[match[0]]), match[0]
    for match in matches(data, r"trigram\.buckets_(\d+)"):
        assert torch.equal(buckets(ngrams(context(data["bigram.tokens"]), 3), int(match[1])), data[match[0]]), match[0]


def test_buckets_by_hand() -> None:
    ids = torch.tensor([[3, 5, 0, 4]])
    pairs = [(36_313 * now ^ 27_191 * before) % 99 for before, now in ((3, 5), (5, 0), (0, 4))]
    triples = [(36_313 * c ^ 27_191 * b ^ 51_497 * a) % 99 for a, b, c in ((3, 5, 0), (5, 0, 4))]
    assert buckets(ngrams(context(ids), 2), 100).tolist() == [[99, *pairs]]
    assert buckets(ngrams(context(ids), 3), 100).tolist() == [[99, 99, *triples]]
    starts = torch.tensor([[False, False, True, False]])
    assert buckets(ngrams(context(ids, starts), 2), 100).tolist() == [[99, pairs[0], 99, pairs[2]]]
    assert buckets(ngrams(context(ids, starts), 3), 100).tolist() == [[99, 99, 99, 99]]


def test_rows_of_signs_by_hand() -> None:
    """7 xor 12 is 11, 12 xor 1 is 13: rows 3 and 5 of 8; three tokens, 7 xor 12 xor 1 is 10: row 2."""
    ids, starts = torch.tensor([[7, 12, 1]]), torch.tensor([[True, False, False]])
    assert sign_rows(ngrams(context(ids), 2), 8).tolist() == [[0, 3, 5]]
    assert sign_rows(ngrams(context(ids), 3), 8).tolist() == [[0, 0, 2]]
    assert sign_rows(ngrams(context(ids, starts.roll(1, 1)), 2), 8).tolist() == [[0, 0, 5]]


def signed(signs: int | None, dims: int | None) -> TokenTable:
    module = TokenEmbedding(bigrams=HashedNGrams(buckets=100, dims=dims, signs=signs)).build(16, 4)
    initialize(module, 0)
    with torch.no_grad():
        module.weight.fill_(1.0)
        assert module.bigrams is not None
        module.bigrams.weight.copy_(torch.arange(1.0, 401.0).reshape(100, 4) if dims is None else torch.ones(100, dims))
    return module


def test_signs_tell_apart_what_shares_a_row() -> None:
    ids = torch.tensor([[7, 12, 1]])
    module = signed(8, None)
    assert module.bigrams is not None
    signs = module.bigrams.get_buffer("signs").sign()
    assert signs.shape == (8, 4)
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    rows = module.bigrams.weight[buckets(ngrams(context(ids), 2), 100)[0]]
    expected = rms_norm(1.0 + 0.05 * rows * signs[[0, 3, 5]])
    torch.testing.assert_close(module(context(ids))[0], expected)
    assert not torch.allclose(signed(None, None)(context(ids)), module(context(ids)))
    projected = signed(8, 3)
    assert projected.bigrams is not None
    assert projected.bigrams.projection is not None
    own = projected.bigrams.get_buffer("signs")[[0, 3, 5]].sign() @ projected.bigrams.projection.weight.T
    torch.testing.assert_close(projected(context(ids))[0], rms_norm(1.0 + 0.05 * own))


def test_signs_are_drawn_from_the_name_and_not_stored() -> None:
    a, b = signed(8, None), EVERYTHING.but({"bigrams.signs": 8, "trigrams.signs": 8}).build(16, 4)
    initialize(b, 5)
    assert a.bigrams is not None
    assert b.bigrams is not None
    assert b.trigrams is not None
    assert torch.equal(a.bigrams.get_buffer("signs"), b.bigrams.get_buffer("signs")), "whatever the seed of the run"
    assert not torch.equal(b.bigrams.get_buffer("signs"), b.trigrams.get_buffer("signs")[:, :4])
    assert "bigrams.signs" not in b.state_dict()
    assert "bigrams.signs" not in declarations(b)


# What enters the stream


def test_what_enters_is_that_of_the_script_with_bigrams_and_channel_smear(parity: Path) -> None:
    """That script smears across documents too: no starts are given."""
    golden = Golden(parity / "S002")
    weights, tokens, expected = golden.weights, golden.tokens, golden.expected
    rows, dims = weights["bigram.embed.weight"].shape
    embedding = TokenEmbedding(bigrams=HashedNGrams(buckets=rows, dims=dims), smear=ChannelSmear())
    module = embedding.build(*weights["tok_emb.weight"].shape)
    names = {
        "weight": "tok_emb.weight",
        "bigrams.weight": "bigram.embed.weight",
        "bigrams.projection.weight": "bigram.proj.weight",
        "bigrams.scale": "bigram.scale",
        "smear.gate": "smear.gate",
    }
    module.load_state_dict({ours: weights[theirs].float() for ours, theirs in names.items()})
    surroundings = context(tokens["inputs"])
    assert torch.equal(buckets(ngrams(surroundings, 2), rows), expected["bigram_bucket_ids"])
    ours, script = recorded(expected, "x0", module(surroundings))
    assert (ours - script).abs().max() < 1e-5


@pytest.mark.parametrize(("inputs", "x0"), [("inputs", "loop_on.x0"), ("packed_inputs", "packed_loop_on.x0")])
def test_what_enters_is_that_of_the_script_with_token_smear(inputs: str, x0: str, parity: Path) -> None:
    golden = Golden(parity / "TOP")
    weights, tokens = golden.weights, golden.tokens
    module = TokenEmbedding(smear=TokenSmear()).build(*weights["tok_emb.weight"].shape)
    names = {"weight": "tok_emb.weight", "smear.gate.weight": "smear_gate.weight", "smear.scale": "smear_lambda"}
    state = {ours: weights[theirs].float() for ours, theirs in names.items()}
    module.load_state_dict({**state, "smear.scale": state["smear.scale"].squeeze()})
    ids = tokens[inputs]
    starts = golden.starts(ids)
    assert starts is not None
    assert starts.any()
    ours, script = recorded(golden.expected, x0, module(context(ids, starts)))
    assert (ours - script).abs().max() < 1e-5


@pytest.mark.parametrize("dims", [None, 2])
def test_rows_of_pairs_by_hand(dims: int | None) -> None:
    module = TokenEmbedding(bigrams=HashedNGrams(buckets=100, dims=dims)).build(8, 2)
    initialize(module, 0)
    ids, table = torch.tensor([[3, 5]]), module.bigrams
    assert table is not None
    with torch.no_grad():
        module.weight.copy_(torch.arange(16.0).reshape(8, 2))
        table.weight[99] = torch.tensor([1.0, 2.0])
        table.weight[(36_313 * 5 ^ 27_191 * 3) % 99] = torch.tensor([20.0, -40.0])
        added = torch.tensor([[0.05, 0.1], [1.0, -2.0]])
        if table.projection is not None:
            table.projection.weight.copy_(torch.tensor([[0.0, 1.0], [3.0, 0.0]]))
            added = torch.tensor([[0.1, 0.15], [-2.0, 3.0]])
        torch.testing.assert_close(module(context(ids))[0], rms_norm(torch.tensor([[6.0, 7.0], [10.0, 11.0]]) + added))


def test_smears_by_hand() -> None:
    # the norm of (3, 4) is (0.6, 0.8) times the root of 2, that of (0, 2) is (0, 1) times it
    x = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [3.0, 4.0]]])
    surroundings = context(torch.zeros(1, 3), torch.tensor([[False, False, True]]))
    channel, token = ChannelSmear().build(2), TokenSmear().build(2)
    initialize(channel, 0)
    initialize(token, 0)
    with torch.no_grad():
        half = torch.tensor([[[0.3, 0.4], [0.3, 0.9], [0.3, 0.4]]]) * math.sqrt(2)
        torch.testing.assert_close(channel(x, surroundings), half)
        channel.gate.copy_(torch.tensor([math.log(3.0), -math.log(3.0)]))  # a share of 3/4 and of 1/4
        most = torch.tensor([[[0.15, 0.6], [0.45, 0.95], [0.15, 0.6]]]) * math.sqrt(2)
        torch.testing.assert_close(channel(x, surroundings), most)

        torch.testing.assert_close(token(x, surroundings), rms_norm(x))
        token.scale.fill_(2.0)
        token.gate.weight.copy_(torch.tensor([[5.0, math.log(3.0) / 2]]))  # of (0, 2) the gate is 3/4
        expected = torch.tensor([[[3.0, 4.0], [4.5, 8.0], [3.0, 4.0]]])
        torch.testing.assert_close(token(x, surroundings), rms_norm(expected))


def test_channels_smear_like_the_scripts(parity: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose function takes what is normed already."""
    data = tensors(parity / "components" / "functions" / "functions")
    monkeypatch.setattr("caddie.model.smear.rms_norm", lambda x: x)
    gate, before = data["smear_v1.gate"], data["smear_v1.in"]
    module = ChannelSmear().build(len(gate))
    module.load_state_dict({"gate": gate})
    smeared = module(before, context(torch.zeros(before.shape[:2])))
    torch.testing.assert_close(smeared, data["smear_v1.out"], rtol=0, atol=1e-6)


def test_the_gate_of_a_token_reads_its_first_twelve_channels() -> None:
    smear = TokenSmear().build(WIDTH)
    initialize(smear, 0)
    with torch.no_grad():
        smear.scale.fill_(1.0)
        smear.gate.weight.fill_(1.0)
    for channel, read in ((11, True), (12, False)):
        x = torch.zeros(1, 2, WIDTH)
        x[0, 0, 0] = 1.0  # the token before
        x[0, 1, channel] = 1.0
        share = 1 / (1 + math.exp(-1)) if read else 0.5
        after = smear(x, context(torch.zeros(1, 2)))[0, 1]
        assert (after[0] / after[channel]).item() == pytest.approx(share)


# What each may see


@every_way
def test_nothing_is_seen_but_the_nearest_tokens_of_the_same_document(way: str) -> None:
    module, ids, starts = random_table(WAYS[way]), some_ids(), some_starts()
    document, reach = starts.cumsum(1), REACH.get(way, 1)
    with torch.no_grad():
        before = module(context(ids, starts))
        assert before.shape == (2, 20, WIDTH)
        for row, position in [(0, 0), (0, 5), (0, 6), (0, 7), (0, 8), (1, 3), (1, 9), (1, 10), (1, 11)]:
            changed = ids.clone()
            changed[row, position] = (changed[row, position] + 5) % VOCABULARY
            moved = ((module(context(changed, starts)) - before).abs().amax(-1) > 1e-6).nonzero().tolist()
            near = [
                at
                for at in range(position, min(position + reach, 19) + 1)
                if document[row, at] == document[row, position]
            ]
            assert moved[0] == [row, position]
            assert moved[-1] == [row, near[-1]] or len(near) <= reach, "as far as it reaches"
            assert all(where == row and at in near for where, at in moved)


# Settings


def test_nothing_is_added_unless_asked_for() -> None:
    module = random_table(TokenEmbedding())
    ids = some_ids()
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert torch.equal(module(context(ids)), rms_norm(module.weight[ids]))
    assert find("baseline").parameters == 17_059_912


def test_parameters_and_roles_by_hand() -> None:
    module = EVERYTHING.but(smear="TokenSmear").build(VOCABULARY, WIDTH)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {
        "weight": (VOCABULARY, WIDTH),
        "bigrams.weight": (101, WIDTH),
        "bigrams.scale": (),
        "trigrams.weight": (103, 8),
        "trigrams.projection.weight": (WIDTH, 8),
        "trigrams.scale": (),
        "smear.gate.weight": (1, 12),
        "smear.scale": (),
    }
    roles = {name: declaration.role for name, declaration in declarations(module).items()}
    assert {name for name, role in roles.items() if role == "embedding"} == {
        "weight",
        "bigrams.weight",
        "trigrams.weight",
    }
    assert {name for name, role in roles.items() if role == "matrix"} == {"trigrams.projection.weight"}
    assert {role for name, role in roles.items() if name.endswith(("gate.weight", "scale"))} == {"scalar"}
    baseline = find("baseline")
    full = baseline.but({"model.embedding.bigrams": HashedNGrams(buckets=2048, dims=128)})
    assert full.parameters == baseline.parameters + 2048 * 128 + 128 * 512 + 1


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ({"bigrams.buckets": 1}, "bigrams.buckets must be from 2 to"),
        ({"bigrams.dims": 0}, "bigrams.dims must be from 1 to"),
        ({"smear": "Smear"}, "smear must be one of ChannelSmear, TokenSmear"),
    ],
)
def test_settings_that_make_no_sense_are_a_mistake(diff: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EVERYTHING.but(diff)


def test_smears_are_found_by_name() -> None:
    for smear in (ChannelSmear(), TokenSmear()):
        assert isinstance(smear, Smear)
        assert TokenEmbedding.from_json(TokenEmbedding(smear=smear).to_json()).smear == smear
