"""Presets: every one builds and runs, says where it stands, and has the numbers of its source."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest
import torch

import pydml
from pydml.cli import main
from pydml.losses import LOSSES, ProxyLoss
from pydml.presets import Source, mean_squared_norm, near_presets, preset, presets

ALL = presets()
SIZES = {"num_classes": 6, "embedding_size": 8}


def build(name: str) -> Any:
    return preset(name, **{argument: SIZES[argument] for argument in ALL[name].required})


@pytest.mark.parametrize("name", ALL)
def test_preset_builds_and_runs(name: str) -> None:
    module = build(name)
    assert type(module) is ALL[name].loss
    embeddings = torch.randn(30, 8, requires_grad=True)
    loss = module(embeddings, torch.arange(30) % 6)
    loss.backward()
    assert torch.isfinite(loss)
    assert embeddings.grad is not None and torch.isfinite(embeddings.grad).all()
    assert embeddings.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ALL)
def test_preset_names_only_arguments_of_its_class_and_sets_them(name: str) -> None:
    known = set(inspect.signature(ALL[name].loss).parameters) | set(
        inspect.signature(pydml.losses.MetricLoss).parameters
    )
    assert set(ALL[name].kwargs) <= known
    module = build(name)
    for argument, value in ALL[name].kwargs.items():
        if argument != "beta" or not getattr(module, "learn_beta", False):
            assert setting(module, argument) == value


@pytest.mark.parametrize("name", ALL)
def test_preset_says_where_it_stands(name: str) -> None:
    chosen = ALL[name]
    assert chosen.source in get_args(Source)
    assert chosen.note.endswith(".") and len(chosen.note) > 20
    where = name.partition("/")[2]
    kinds = {"paper": "paper", "official": "code", "code": "code", "pml": "code", "thesis": "thesis"}
    if where in kinds:
        assert chosen.source == kinds[where]
    for word in ("sampler", "miner"):
        named = chosen.recipe.get(word, "").partition(" ")[0].partition("(")[0].strip(":")
        if named:
            assert hasattr(getattr(pydml, f"{word}s"), named), f"{named} is no {word} of pydml"


def setting(module: Any, argument: str) -> Any:
    return module.kind if argument == "distance" else getattr(module, argument)


def test_every_loss_has_a_preset() -> None:
    assert {chosen.loss for chosen in ALL.values()} == set(LOSSES.values())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("ms/paper", {"alpha": 2, "beta": 50, "base": 1.0, "epsilon": 0.1}),
        ("ms/official", {"alpha": 2, "beta": 40, "base": 0.5, "epsilon": 0.1}),
        ("ms/thesis", {"alpha": 2, "beta": 50, "base": 0.5, "epsilon": 0.1}),
        ("ms/thesis-tuned", {"alpha": 18, "beta": 76, "base": 0.8, "epsilon": 0.4}),
        ("ms/pml", {"alpha": 2, "beta": 50, "base": 0.5, "epsilon": None}),
        ("contrastive/xbm", {"pos_margin": 1, "neg_margin": 0.5, "distance": "cosine", "denominator": "batch"}),
        ("contrastive/thesis-code", {"pos_margin": 0, "neg_margin": 0.5, "distance": "euclidean"}),
        ("lifted-star/paper", {"alpha": 2, "beta": 50, "epsilon": None}),
        ("lifted-star/code", {"alpha": 2, "beta": 40}),
        ("binomial/code", {"alpha": 2, "beta": 40, "base": 0.5}),
        ("triplet/thesis", {"margin": 0.1, "triplets": "semihard", "distance": "cosine"}),
        ("ephn/paper", {"positive": "easy", "negative": "hard", "order": 1, "temperature": 1}),
        ("ephn/official", {"order": 1, "temperature": 0.1, "official": True}),
        ("epshn-2nd/paper", {"negative": "semihard", "order": 2, "temperature": 1}),
        ("fastap/official", {"num_bins": 10}),
        ("dro-topk/paper", {"k": 160, "margin": 0.2, "threshold": 0.5, "balanced": False}),
        ("dro-topk-pn/paper-in-shop", {"k": 1280, "balanced": True}),
        ("dro-kl-g/paper-0.001", {"gamma_pos": 0.001, "gamma_neg": 0.001, "margin": 0.2, "threshold": 0.5}),
        ("margin/thesis", {"margin": 0.5, "learn_beta": True, "distance": "euclidean"}),
        ("proxy-nca/paper", {"softmax_scale": 1, "include_positive": False, "distance": "squared"}),
        ("arcface/thesis-code", {"margin": 28.6, "scale": 220}),
        ("soft-triple/official", {"la": 20, "gamma": 0.1, "margin": 0.01, "tau": 0.2, "centers_per_class": 10}),
        ("soft-triple/thesis-tuned", {"la": 78, "gamma": 1 / 58, "margin": 0.4, "tau": 0.4}),
        ("proxy-anchor/paper", {"margin": 0.1, "alpha": 32}),
        ("proxy-repulsion/thesis-v1", {"margin": 0.1, "alpha": 32, "variant": "proxy"}),
        ("proxy-repulsion/thesis-v2", {"variant": "batch", "aggregate": "sum"}),
    ],
)
def test_numbers_are_those_of_the_source(name: str, numbers: dict[str, Any]) -> None:
    module = build(name)
    assert {argument: setting(module, argument) for argument in numbers} == numbers


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("/pml")])
def test_pml_presets_have_pml_defaults(name: str) -> None:
    pml = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
    ours = build(name)
    theirs = getattr(pml, ALL[name].loss.pml or "")
    for argument, parameter in inspect.signature(theirs.__init__).parameters.items():
        if isinstance(parameter.default, (bool, int, float, str)) and hasattr(ours, argument):
            assert getattr(ours, argument) == parameter.default, argument


def test_the_margin_of_lifted_structure_cancels_in_the_dro_paper() -> None:
    embeddings, labels = torch.randn(20, 8, dtype=torch.float64), torch.arange(20) % 4
    values = [preset("generalized-lifted/dro", pos_margin=m, neg_margin=m)(embeddings, labels) for m in (0.0, 0.5, 0.9)]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])


def test_n_pairs_penalty_is_the_mean_squared_norm() -> None:
    embeddings, labels = 3 * torch.eye(4, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    plain = preset("n-pairs/pml", normalize_embeddings=False)(embeddings, labels)
    torch.testing.assert_close(preset("n-pairs/paper")(embeddings, labels), plain + 0.02 * 9)
    assert mean_squared_norm(embeddings) == 9


def test_overrides_replace_and_add() -> None:
    module = preset("ms/paper", beta=10, reduction="sum")
    assert (module.alpha, module.beta, module.reduction) == (2, 10, "sum")
    assert preset("ms/paper").beta == 50


@pytest.mark.parametrize("name", [name for name, chosen in ALL.items() if issubclass(chosen.loss, ProxyLoss)])
def test_proxy_presets_say_what_they_need(name: str) -> None:
    with pytest.raises(TypeError, match=r"needs num_classes and embedding_size"):
        preset(name)
    with pytest.raises(TypeError, match=r"needs embedding_size: preset"):
        preset(name, num_classes=3)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ms/papr", "'ms/paper'"),
        ("soft", "'soft-triple/official'"),
        ("fast_ap/official", "'fastap/official'"),
        ("MultiSimilarity/paper", "'ms/paper'"),
        ("multi_similarity", "'ms/paper'"),
        ("TripletMarginLoss", "'triplet/thesis'"),
        ("ms_paper", "'ms/paper'"),
    ],
)
def test_unknown_names_name_the_likest_first(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"preset: got '{name}', wanted .*near matches: {near}"):
        preset(name)


def test_one_wrong_letter_still_finds_the_preset() -> None:
    for name in ALL:
        at = len(name) // 2
        for wrong in (name[:at] + name[at + 1 :], name[:at] + "x" + name[at:]):
            assert name in near_presets(wrong), wrong


def test_a_name_like_none_still_gets_an_answer() -> None:
    assert len(near_presets("zzz")) == 3


def test_the_command_lists_presets_those_of_a_word_and_one_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, one.loss.__name__] for name, one in ALL.items()]
    assert all(line.endswith(one.note) for line, one in zip(lines, ALL.values(), strict=True))
    for word in ("ephn", "multisimilarity"):
        assert main(["presets", word]) == 0
        names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert names == [n for n, one in ALL.items() if word in n or word in one.loss.__name__.lower()] != []
    assert main(["presets", "proxy-anchor/paper"]) == 0
    whole = capsys.readouterr().out
    chosen = ALL["proxy-anchor/paper"]
    for words in (chosen.note, "margin=0.1, alpha=32", "num_classes=…, embedding_size=…", chosen.recipe["parameters"]):
        assert words in whole


def test_the_command_says_what_is_near_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "ms/papr"]) == 2
    assert "got 'ms/papr', wanted a preset or a part of one; near matches: ms/paper" in capsys.readouterr().err


def test_presets_cannot_be_changed() -> None:
    presets().clear()
    assert presets() == ALL
    with pytest.raises(AttributeError):
        ALL["ms/paper"].note = "changed"  # type: ignore[misc]
    with pytest.raises(TypeError):
        ALL["ms/paper"].kwargs["alpha"] = 3  # type: ignore[index]
