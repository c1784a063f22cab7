import pytest
import torch

from offload.cli.model import Shape, build_model, choose_shape, parameter_groups
from offload.errors import ConfigError


@pytest.mark.parametrize(
    "target", [200_000, 1_000_000, 25_000_000, 125_000_000, 10**9, 7 * 10**9, 70 * 10**9, 10**12]
)
def test_the_shape_has_the_size_asked_for_and_sensible_proportions(target: int) -> None:
    shape = choose_shape(target)
    assert shape.numel == pytest.approx(target, rel=0.12)
    assert 30 <= shape.hidden / shape.layers <= 500
    head_numel = shape.hidden // shape.heads
    assert head_numel * shape.heads == shape.hidden
    assert head_numel % 2 == 0  # Rotary embeddings turn pairs.


def test_fixed_depth_or_width_is_kept() -> None:
    assert choose_shape(25_000_000, layers=2).layers == 2
    assert choose_shape(25_000_000, layers=2).numel == pytest.approx(25_000_000, rel=0.12)
    assert choose_shape(25_000_000, hidden=256).hidden == 256
    assert choose_shape(25_000_000, hidden=256).numel == pytest.approx(25_000_000, rel=0.12)
    assert choose_shape(25_000_000, layers=1, hidden=32) == Shape(1, 32)


@pytest.mark.parametrize(
    ("target", "fixed", "field"),
    [
        (25_000_000, {"layers": 0}, "--layers"),
        (25_000_000, {"hidden": 0}, "--hidden"),
        (25_000_000, {"hidden": 40}, "--hidden"),
        (10, {}, "--params"),
        (10**9, {"hidden": 16}, "--params"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(target: int, fixed: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_shape(target, **fixed)
    assert caught.value.field == field


@pytest.mark.parametrize("shape", [Shape(1, 32), Shape(3, 144), Shape(2, 256)])
@pytest.mark.slow
def test_the_size_is_that_of_the_model(shape: Shape) -> None:
    model = build_model(shape, seq=16, dtype=torch.float32, device="cpu", seed=0)
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())


def test_weights_depend_on_the_seed_only() -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.rand(7)
        model = build_model(Shape(1, 32), seq=16, dtype=torch.bfloat16, device="cpu", seed=seed)
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))
    assert {weight.dtype for weight in weights(1)} == {torch.bfloat16}


def test_a_model_is_never_there_in_a_larger_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are those of the fp32 model, rounded; no parameter is made in fp32 and cast."""
    made = set()
    register = torch.nn.Module.register_parameter

    def look(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        made.add(None if parameter is None else parameter.dtype)
        register(module, name, parameter)

    expected = build_model(Shape(2, 32), seq=16, dtype=torch.float32, device="cpu", seed=0)
    monkeypatch.setattr(torch.nn.Module, "register_parameter", look)
    found = build_model(Shape(2, 32), seq=16, dtype=torch.bfloat16, device="cpu", seed=0)
    assert torch.bfloat16 in made
    assert torch.float32 not in made
    assert torch.get_default_dtype() == torch.float32
    for weight, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other.bfloat16())


def test_rotary_frequencies_keep_their_precision() -> None:
    model = build_model(Shape(1, 32), seq=16, dtype=torch.bfloat16, device="cpu", seed=0)
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build_model(Shape(2, 32), seq=16, dtype=torch.float32, device="cpu", seed=0)
    matrices, vectors = parameter_groups(model, weight_decay=0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in matrices["params"])
    assert all(parameter.dim() == 1 for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
