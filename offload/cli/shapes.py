"""Models: shapes of well-known ones, their parameters, and what forward and backward keep on the device."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from offload.cli.values import read_values
from offload.config import EXACT_NAMES
from offload.errors import ConfigError, OffloadError

MOST_LAYERS, MOST_MODULES = 1_000, 70_000
"""Most layers of a model that a configuration describes, and most modules and parameters together. To make the model
without memory takes a tenth of a millisecond for each of the latter."""

LOGIT_BYTES = 10
"""Bytes that are kept of each logit: 2 in 16 bits, 4 of its fp32 copy, 4 of the copy's gradient."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family, whose feed-forward layers are gated.

    Attributes:
        hidden: Width.
        layers: How many.
        inner: Width of the feed-forward layers.
        shared: Width of keys, and of values, which query heads share.
        vocabulary: Tokens.
        tied: Whether the output layer is the embedding.
        biased: Whether queries, keys and values have a bias.
    """

    hidden: int
    layers: int
    inner: int
    shared: int
    vocabulary: int
    tied: bool = False
    biased: bool = False

    @property
    def layer_params(self) -> int:
        """Parameters of a layer."""
        # Queries and attention's output are `hidden` wide, keys and values `shared`.
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.shared
        return attention + 3 * self.hidden * self.inner + self._small_params

    @property
    def _small_params(self) -> int:
        """Parameters of a layer's norms and biases."""
        norms = 2 * self.hidden
        return norms + (self.hidden + 2 * self.shared if self.biased else 0)

    @property
    def _embedding_params(self) -> int:
        """Parameters of the embedding and of the output layer."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self._embedding_params + self.layers * self.layer_params + self.hidden

    @property
    def rest_params(self) -> int:
        """Parameters outside of all layers: the embedding, the output layer, a last norm."""
        return self._embedding_params + self.hidden

    @property
    def exact_params(self) -> int:
        """Parameters that are kept exact where others share scales: embeddings, the output layer, norms, biases."""
        return self._embedding_params + self.layers * self._small_params + self.hidden

    @property
    def largest_params(self) -> int:
        """Parameters of the largest tensor."""
        return max(self.vocabulary * self.hidden, self.hidden * self.inner)

    def activation_bytes(self, tokens: int, *, recompute: bool) -> int:
        """Return about how many bytes of activations are kept for backward, if attention keeps no scores.

        Of each token a layer keeps, in 16 bits: two norms' inputs and results, queries and attention's result (6
        tensors of width `hidden`); keys and values (2 of `shared`); and 4 of the feed-forward layer (`inner`). With
        recomputation every layer keeps its input alone, and the one that is being computed keeps all of these. Logits
        come on top.

        Args:
            tokens: Of one rank, in a micro-step.
            recompute: Whether activations are recomputed in backward (gradient checkpointing).
        """
        layer_bytes = 2 * (6 * self.hidden + 2 * self.shared + 4 * self.inner)
        kept_bytes = layer_bytes * self.layers
        if recompute:
            input_bytes = 2 * self.hidden
            kept_bytes = input_bytes * self.layers + layer_bytes
        return tokens * (kept_bytes + LOGIT_BYTES * self.vocabulary)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of 16-bit weights that a rank of a sharded model gathers: two layers, and the largest tensor."""
        return 2 * (2 * self.layer_params + self.largest_params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and its training.

    Attributes:
        params: All its parameters.
        exact_params: How many of them have exact state where that of others is stored in blocks.
        shape: None where only its size is known. Activations are counted if it and `tokens` are.
        weights_on: Where its weights lie: on the "gpu"; in "host" memory, computed on the GPU; in a file on a "path",
            computed on the GPU if there is one; in host memory, computed by the "cpu".
        rule: Name of the update rule.
        tokens: Of one rank in an iteration; None to predict the step alone.
        accumulate: Micro-steps that the tokens come in.
        recompute: Whether backward repeats the forward pass.
        clip: Whether every step clips gradients, so that no update in backward stays.
        stage: What ranks divide among them, as ZeRO's stages: state; gradients from 2 on; weights from 3 on.
    """

    params: int
    exact_params: int = 0
    shape: Shape | None = None
    weights_on: str = "cpu"
    rule: str = "adam"
    tokens: int | None = None
    accumulate: int = 1
    recompute: bool = False
    clip: bool = False
    stage: int = 3

    @property
    def weights_on_gpu(self) -> bool:
        """Whether its weights lie on GPUs."""
        return self.weights_on == "gpu"

    @property
    def is_streamed(self) -> bool:
        """Whether its weights lie elsewhere than where they are computed."""
        return self.weights_on in ("host", "path")


MODELS = {
    "llama-2-7b": Shape(4096, 32, 11008, 4096, 32000),
    "llama-2-13b": Shape(5120, 40, 13824, 5120, 32000),
    "llama-1b": Shape(2048, 16, 8192, 512, 128256, tied=True),
    "llama-3b": Shape(3072, 28, 8192, 1024, 128256, tied=True),
    "llama-8b": Shape(4096, 32, 14336, 1024, 128256),
    "llama-70b": Shape(8192, 80, 28672, 1024, 128256),
    "llama-405b": Shape(16384, 126, 53248, 1024, 128256),
    "mistral-7b": Shape(4096, 32, 14336, 1024, 32000),
    "qwen-0.5b": Shape(896, 24, 4864, 128, 151936, tied=True, biased=True),
    "qwen-1.5b": Shape(1536, 28, 8960, 256, 151936, tied=True, biased=True),
    "qwen-7b": Shape(3584, 28, 18944, 512, 152064, biased=True),
    "qwen-14b": Shape(5120, 48, 13824, 1024, 152064, biased=True),
    "qwen-32b": Shape(5120, 64, 27648, 1024, 152064, biased=True),
    "qwen-72b": Shape(8192, 80, 29568, 1024, 152064, biased=True),
}
"""By the configurations that their makers publish: Llama 2, 3.1 and 3.2, Mistral 7B v0.1, Qwen 2.5."""


def parse_model(field: str, value: str) -> str:
    """Return a model's name as `MODELS` has it.

    Raises:
        ConfigError: It is not known. The error suggests the model of the same family that is nearest in size, or else
            one whose name is similar.
    """
    name = value.strip().lower()
    if name not in MODELS:
        # Qwen/Qwen2.5-7B-Instruct: family qwen, 7 billion parameters.
        published = re.fullmatch(r"(?:.*/)?(?:meta-)?([a-z]+)(?:[\d.]*(?:-[\d.]+)?-)?(\d+(?:\.\d+)?)b\b.*", name)
        similar = difflib.get_close_matches(name, MODELS, n=1)
        family = [known for known in MODELS if published and known.startswith(f"{published[1]}-")]
        if published and family:  # the nearest in size, not in letters: llama-2-7b for llama-7b, not llama-70b
            log_params = math.log(max(1.0, 1e9 * float(published[2])))
            similar = [min(family, key=lambda known: abs(math.log(MODELS[known].params) - log_params))]
        guess = f"did you mean {similar[0]}? " if similar else ""
        advice = f"{guess}name one of {', '.join(MODELS)}, or give --config FILE or --params N"
        raise ConfigError(field, value, advice)
    return name


def model_of(arguments: argparse.Namespace, *, weights_on: str) -> Model:
    """Return the model that `offload plan` is asked about.

    Raises:
        ConfigError: No model is made of its configuration.
    """
    shape: Shape | None = None
    if arguments.params is not None:
        params, exact_params = arguments.params, 0
    elif arguments.model is not None:
        shape = MODELS[arguments.model]
        params, exact_params = shape.params, shape.exact_params
    else:
        params, exact_params, shape = _read_hf_config(arguments.config)
    return Model(
        params=params,
        exact_params=exact_params,
        shape=shape,
        weights_on=weights_on,
        **{name: getattr(arguments, name) for name in ("rule", "tokens", "accumulate", "recompute", "clip", "stage")},
    )


def _read_hf_config(file: str) -> tuple[int, int, Shape | None]:
    """Count the parameters of the model that a Hugging Face configuration describes.

    transformers makes the model on torch's "meta" device, where parameters have shapes but no memory.

    Args:
        file: The configuration, or the folder with its config.json.

    Returns:
        The number of parameters; how many of them are kept exact where others are stored in blocks; and the model's
        shape, None if it is not of the Llama family.
    """
    from offload.dtypes import DtypeCode
    from offload.layout import Parameter, keep_exact

    values = read_values("--config", os.path.join(file, "config.json") if os.path.isdir(file) else file)
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError("--config", file, 'it has no "model_type", so it is not a Hugging Face configuration')
    try:
        import torch
        import transformers
    except ImportError as cause:
        raise OffloadError("reading a config.json needs transformers: pip install transformers") from cause
    try:
        # "auto_map" names Python code of the model's own: without it transformers runs none, and does not ask to.
        config = transformers.AutoConfig.for_model(**{name: values[name] for name in values if name != "auto_map"})
        if not 0 <= (layers := getattr(config, "num_hidden_layers", 0)) <= MOST_LAYERS:
            raise ValueError(f"it has {layers} layers, and {MOST_LAYERS:,} are the most")
        with torch.device("meta"), _limit_modules(MOST_MODULES):
            from_config: Any = transformers.AutoModelForCausalLM.from_config
            model = from_config(config)
    except Exception as cause:  # whatever a model's code makes of values that it was not written for
        advice = f"transformers {transformers.__version__} makes no model of it: {cause!r}"
        raise ConfigError("--config", file, advice) from cause
    parameters = keep_exact(
        [  # 0: of the first parameter group
            Parameter(name, parameter.numel(), DtypeCode.BFLOAT16, 0, shape=tuple(parameter.shape))
            for name, parameter in model.named_parameters()
        ],
        EXACT_NAMES,
    )
    params = sum(p.numel for p in parameters)
    return params, sum(p.numel for p in parameters if p.exact), _shape_of(config, params)


def _shape_of(config: Any, params: int) -> Shape | None:
    """Return the shape that a configuration describes; None if the model is not of the Llama family.

    It counts as one of the family if it has exactly as many parameters, `params`, as the shape, biased or not.
    """
    try:
        heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = Shape(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            inner=config.intermediate_size,
            shared=head_width * config.num_key_value_heads,
            vocabulary=config.vocab_size,
        )
    except (AttributeError, TypeError, ZeroDivisionError):
        return None
    shapes = [replace(shape, tied=bool(config.tie_word_embeddings), biased=biased) for biased in (False, True)]
    return next((shape for shape in shapes if shape.params == params), None)


@contextlib.contextmanager
def _limit_modules(count: int) -> Iterator[None]:
    """Raise `ValueError` in this block when more than `count` modules and parameters have been registered.

    A configuration may ask for millions, which would take minutes to make.
    """
    from torch.nn.modules import module

    numbers = itertools.count(1)

    def refuse_more(parent: object, name: str, child: object) -> None:
        """Torch's hook, called for each module or parameter that a module gets."""
        if next(numbers) > count:
            raise ValueError(f"it has more than {count:,} modules and parameters")

    hooks = [
        module.register_module_module_registration_hook(refuse_more),
        module.register_module_parameter_registration_hook(refuse_more),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
