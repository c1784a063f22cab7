"""The language model that `offload train` trains: a Llama of any size, with random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from offload.cli.text import VOCABULARY
from offload.errors import ConfigError

_HIDDEN_PER_LAYER = 128
"""Width over depth of the published Llama models (4096 / 32); what `choose_shape` prefers."""
_MAX_LAYERS = 200


@dataclass(frozen=True, slots=True)
class Shape:
    """Depth and width, and what follows from them."""

    layers: int
    hidden: int

    @property
    def heads(self) -> int:
        """Number of attention heads. Each has 64 elements, or the largest power of two below that divides the width.

        In models that are at least 2048 wide it is 128, if that divides the width.
        """
        sizes = (128, 64, 32, 16) if self.hidden >= 2048 else (64, 32, 16)
        return self.hidden // next(size for size in sizes if self.hidden % size == 0)

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward part: 8/3 of the hidden width, to the next multiple of 64."""
        return math.ceil(self.hidden * 8 / 3 / 64) * 64

    @property
    def numel(self) -> int:
        """Number of parameters.

        Each layer has four attention matrices, three feed-forward matrices and two norms. The embedding, which is the
        output layer, too, counts once; a last norm follows the layers.
        """
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + (VOCABULARY + 1) * self.hidden


def choose_shape(target_numel: int, *, layers: int | None = None, hidden: int | None = None) -> Shape:
    """Return the shape whose parameter count is nearest to a target, at the proportions of known models.

    Args:
        target_numel: Parameters wanted; without effect if both other arguments are given.
        layers: Fixed number of layers, or None.
        hidden: Fixed width, a multiple of 16, or None.

    Raises:
        ConfigError: A fixed value cannot be used, or no shape comes near the target.
    """
    if layers is not None and layers < 1:
        raise ConfigError("--layers", layers, "give at least 1")
    if hidden is not None and (hidden < 16 or hidden % 16):
        raise ConfigError("--hidden", hidden, "give a multiple of 16")
    candidates = [
        Shape(count, width)
        for count in ([layers] if layers is not None else range(1, _MAX_LAYERS + 1))
        for width in ([hidden] if hidden is not None else _widths(target_numel, count))
    ]
    best = min(candidates, key=lambda shape: _distance(shape, target_numel))
    is_fixed = layers is not None and hidden is not None
    is_far = abs(math.log(best.numel / target_numel)) > math.log(2)  # by more than a factor of 2
    if not is_fixed and is_far:
        raise ConfigError(
            "--params", target_numel, f"the nearest model has {best.numel} parameters; change --params or the shape"
        )
    return best


def _widths(target_numel: int, layers: int) -> list[int]:
    """Return widths to try for a model of so many layers, around the one with which it has `target_numel` parameters.

    They are multiples of 64, or of 16 in narrow models, where steps of 64 would be too coarse.
    """
    # A layer has about 12 hidden**2 parameters: 4 in attention, 3 * 8/3 in feed-forward (`Shape.numel`).
    exact = math.sqrt(target_numel / (12 * layers))
    grain = 64 if exact >= 512 else 16
    below = max(grain, int(exact // grain) * grain)
    # Small models have much of their weight in the embedding and want to be narrower than `exact`.
    return [width for width in range(below - 4 * grain, below + 2 * grain, grain) if width >= 16]


def _distance(shape: Shape, target_numel: int) -> float:
    """Return how far a shape is from the target's size and from the usual proportions; 0 if it meets both.

    Both are logarithms of ratios, so that twice and half are as far.
    """
    size = abs(math.log(shape.numel / target_numel))
    proportion = abs(math.log(shape.hidden / shape.layers / _HIDDEN_PER_LAYER))
    # Missing the target by 10% is as bad as proportions that are off by a factor of 2.7.
    return size + 0.1 * proportion


def build_model(shape: Shape, *, seq: int, dtype: torch.dtype, device: str, seed: int) -> Any:
    """Return a model with random weights that depend on the seed, the shape, the dtype and the device only.

    The seed becomes that of torch's global random numbers.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=seq,
        tie_word_embeddings=True,
        use_cache=False,
        # The tokens are bytes, and none is special. By default tokens 1 and 2 would begin and end a text.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    # In its own dtype from the start: in fp32 it would take the memory of a model twice as large.
    dtype_argument = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # transformers 4.56 has renamed it
    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, **{dtype_argument: dtype})  # type: ignore[no-untyped-call]
    return model.train()


def parameter_groups(model: Any, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices, which decay, and vectors (norms and biases), which do not."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
