"""Weights that lie in a file: the same numbers, what is asked of the kernel, and what may go wrong."""

from __future__ import annotations

import copy
import io
import itertools
import mmap
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from settling import LONG_S
from tensor_files import saved_as_safetensors
from torch import nn
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.utils.checkpoint import checkpoint

import offload
from offload import metrics
from offload.weights.file import WeightsInFile
from offload.weights.layers import find_layers, units
from offload.weights.mapping import MappedFile, MappedWeights, ReadAheadThread, is_mapped

WIDTH, WORDS = 32, 50


class Model(nn.Module):
    """Tied embeddings, layers, and a norm whose weights stay frozen."""

    def __init__(self, layers: int = 4, recompute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)
        ]
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.recompute = recompute
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) * self.scale
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.head(self.norm(x))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return nn.functional.cross_entropy(model(tokens).float().view(-1, WORDS), tokens.view(-1))


def made(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def optimizer_of(model: nn.Module, folder: Path, **config: Any) -> offload.AdamW:
    settings = {"host_memory": 0, "paths": [folder], "subgroup_numel": 4096} | config
    return offload.AdamW(model.named_parameters(), lr=1e-2, offload=settings)


def trained(model: Model, folder: Path, steps: int = 5, **config: Any) -> list[float]:
    losses = []
    with optimizer_of(model, folder, **config) as optimizer:
        if config.get("overlap") in ("forward", "auto"):
            optimizer.overlap_forward(model)
        for step in range(steps):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(a, b) for (name, a), (again, b) in pairs)


@pytest.mark.parametrize(
    ("dtype", "recompute", "config"),
    [
        (torch.float32, False, {}),
        (torch.bfloat16, False, {"overlap": "auto", "state_format": "compact8"}),
        (torch.float16, True, {"gradient_memory": 0}),
    ],
)
def test_bits_are_those_of_weights_in_memory(
    dtype: torch.dtype, recompute: bool, config: dict[str, Any], tmp_path: Path
) -> None:
    in_memory, in_file = made(dtype, recompute=recompute), made(dtype, recompute=recompute)
    offload.weights_in_file(in_file, tmp_path)
    assert all(is_mapped(weight.data_ptr()) for weight in in_file.parameters())
    assert in_file.head.weight is in_file.words.weight
    assert trained(in_file, tmp_path, **config) == trained(in_memory, tmp_path, **config)
    assert same(in_file, in_memory)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_goes_from_one_to_the_other(tmp_path: Path) -> None:
    models = [made(torch.bfloat16) for _ in range(3)]
    offload.weights_in_file(models[0], tmp_path)
    folders = [tmp_path / "paths", tmp_path / "saved"]
    folders[0].mkdir()
    with optimizer_of(models[0], folders[0]) as optimizer:
        for step in range(2):
            loss_of(models[0], step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.save_checkpoint(folders[1], model=models[0], copy=True)
        optimizer.wait_checkpoint()
    offload.weights_in_file(models[2], tmp_path)
    for model in models[1:]:
        with optimizer_of(model, folders[0]) as optimizer:
            optimizer.load_checkpoint(folders[1], model=model)
            loss_of(model, 2).backward()
            optimizer.step()
    assert same(models[1], models[2])


def test_they_are_tensors_as_any_others(tmp_path: Path) -> None:
    model, plain = made(), made()
    weights = dict(model.named_parameters())
    home = offload.weights_in_file(model, tmp_path)
    assert all(weights[name] is weight for name, weight in model.named_parameters())
    assert os.listdir(tmp_path) == []
    content = io.BytesIO()
    torch.save(model.layers[0][0].weight, content)
    assert len(content.getvalue()) < 2 * model.layers[0][0].weight.nbytes  # not all of the file
    average = copy.deepcopy(model)
    assert not any(is_mapped(weight.data_ptr()) for weight in average.parameters())
    assert torch.equal(loss_of(average.double(), 0), loss_of(made().double(), 0))
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        model.layers[1][0].weight.mul_(2.0)
        plain.layers[1][0].weight.mul_(2.0)
    assert torch.equal(loss_of(model, 0), loss_of(plain, 0))
    gone = weakref.ref(home.file)
    home.close()
    home.close()
    del home
    assert same(model, plain)
    assert all(is_mapped(weight.data_ptr()) for weight in model.parameters())  # an optimizer brings them still
    del model, weights
    until_s = time.monotonic() + LONG_S
    while gone() is not None and time.monotonic() < until_s:  # the thread that reads ahead has it for a moment
        time.sleep(0.001)
    assert gone() is None


def test_shapes_and_strides_stay(tmp_path: Path) -> None:
    odd = nn.Module()
    odd.image = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    odd.turned = nn.Parameter(torch.randn(6, 7).t())
    odd.number, odd.nothing = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 3))
    before = {name: (each.clone(), each.stride()) for name, each in odd.named_parameters()}
    offload.weights_in_file(odd, tmp_path)
    for name, each in odd.named_parameters():
        assert torch.equal(each, before[name][0])
        assert each.stride() == before[name][1]
        assert is_mapped(each.data_ptr()) == (each.numel() > 0)


def test_a_model_is_made_there(tmp_path: Path) -> None:
    plain = made(torch.bfloat16)
    tensors = {name: each for name, each in plain.state_dict().items() if name != "head.weight"}
    tensors["scale"] = tensors["scale"].reshape(1)
    with pytest.raises(offload.ConfigError, match=r"scale, shape \(1,\)"):
        offload.weights_in_file(made(), tmp_path, safetensors=[saved_as_safetensors(tensors, tmp_path / "wrong")])
    scale = tensors.pop("scale")
    names = [*tensors]
    files = [
        saved_as_safetensors({name: tensors[name] for name in part}, tmp_path / f"{number}.safetensors")
        for number, part in enumerate([names[:3], names[3:]])
    ]
    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
    offload.weights_in_file(model, tmp_path, safetensors=files)
    model.scale.copy_(scale[0])
    assert model.head.weight is model.words.weight
    assert not model.norm.weight.requires_grad
    assert same(model, plain)
    assert trained(model, tmp_path) == trained(plain, tmp_path)
    assert same(model, plain)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "recursion"),
        (b"", "no header"),
        (b"\xff" * 64, "no header"),
        ((20).to_bytes(8, "little") + b"{" * 20, "Expecting"),
        ((2).to_bytes(8, "little") + b"[]", "items"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(offload.ConfigError, match=match):
        offload.weights_in_file(made(), tmp_path, safetensors=[tmp_path / "file"])


def test_files_that_are_no_list_or_cut_short_or_missing_are_refused(tmp_path: Path) -> None:
    file = saved_as_safetensors({"norm.weight": torch.ones(WIDTH)}, tmp_path / "file")
    for files in (os.fspath(file), file):
        with pytest.raises(offload.ConfigError, match="a list"):
            offload.weights_in_file(made(), tmp_path, safetensors=files)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        offload.weights_in_file(made(), tmp_path, safetensors=[tmp_path / "missing"])
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(offload.ConfigError, match=r"norm\.weight ends beyond it"):
        offload.weights_in_file(made(), tmp_path, safetensors=[file])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "F8_E4M3"}, "F8_E4M3"),
        ({"shape": [float(WIDTH)]}, "float"),
        ({"shape": [-1, -WIDTH]}, "another size"),
        ({"data_offsets": [0.0, 4.0 * WIDTH]}, "float"),
        ({"shape": [WIDTH, 1]}, r"norm\.bias, shape \(32, 1\)"),
    ],
)
def test_odd_safetensors_change_nothing(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    """What comes first in the file is not read, either."""
    entry = {"dtype": "F32", "shape": [WIDTH], "data_offsets": [4 * WIDTH, 8 * WIDTH]} | change
    tensors = {"norm.weight": torch.zeros(WIDTH), "norm.bias": torch.zeros(WIDTH)}
    file = saved_as_safetensors(tensors, tmp_path / "file", **{"norm.bias": entry})
    model = made()
    with pytest.raises(offload.ConfigError, match=match):
        offload.weights_in_file(model, tmp_path, safetensors=[file])
    assert same(model, made())
    assert not any(is_mapped(weight.data_ptr()) for weight in model.parameters())


class Positioned(Model):
    """With buffers that are in no state dict, as those of rotary embeddings, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("original", self.shift.clone(), persistent=False)
        self.norm.register_buffer("scale", self.scale, persistent=False)
        self.register_buffer("nothing", torch.ones(0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.shift.sum() * self.norm.scale


def test_buffers_that_nothing_can_fill_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Positioned()
    (tmp_path / "path").mkdir()
    plain = dict(made().named_parameters())
    file = saved_as_safetensors(plain, tmp_path / "file")
    for files in ([], [file]):
        with pytest.raises(
            offload.ConfigError, match=r"buffers on the meta device: \['shift', 'original'\].*init_empty"
        ):
            offload.weights_in_file(model, tmp_path / "path", safetensors=files)
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    model.shift, shift = torch.zeros(WIDTH), torch.randn(WIDTH)
    whole = saved_as_safetensors({**plain, "original": shift, "scale": torch.full((), 2.0)}, tmp_path / "whole")
    offload.weights_in_file(model, tmp_path / "path", safetensors=[whole])
    assert torch.equal(model.original, shift)
    assert model.norm.scale is model.scale
    assert model.scale == 2.0


def test_buffers_may_have_memory_where_weights_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, model = Positioned(), Positioned()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad))
    model.head.weight = model.words.weight
    file = saved_as_safetensors({name: each.bfloat16() for name, each in plain.named_parameters()}, tmp_path / "file")
    plain.load_state_dict({name: each.bfloat16() for name, each in plain.state_dict().items()})
    offload.weights_in_file(model, tmp_path, safetensors=[file])
    said = f"{len([*plain.parameters()])} tensors have another dtype in the safetensors files, and are converted: "
    assert f"{said}words.weight from torch.bfloat16 to torch.float32" in caplog.text
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    assert trained(model, tmp_path) == trained(plain, tmp_path)
    assert same(model, plain)


def test_weights_that_no_file_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of several files that was forgotten, say."""

    class Marked(nn.Parameter):
        pass

    tensors = dict(made().named_parameters())
    del tensors["words.weight"], tensors["layers.3.0.bias"]
    with torch.device("meta"):
        model = Model()
    model.norm.bias = Marked(model.norm.bias, requires_grad=False)
    files = [saved_as_safetensors(tensors, tmp_path / "file")]
    offload.weights_in_file(model, tmp_path, safetensors=files)
    assert "3 weights and buffers are in none of the safetensors files, and zero: words.weight" in caplog.text
    assert not model.scale
    assert "another dtype" not in caplog.text
    assert type(model.norm.bias) is Marked
    assert not model.norm.bias.requires_grad
    assert not model.layers[3][0].bias.any()


@pytest.mark.parametrize(
    "leaves",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict(made().state_dict(), assign=True),
        lambda model: setattr(model.layers[2][2].bias, "data", model.layers[2][2].bias.detach().clone()),
        lambda model: setattr(model.layers[2][2], "bias", nn.Parameter(torch.zeros(WIDTH))),
    ],
)
def test_a_weight_that_has_left_is_named(leaves: Callable[[Model], Any], tmp_path: Path) -> None:
    model = made()
    in_file = offload.weights_in_file(model, tmp_path)
    loss_of(model, 0).backward()
    leaves(model)
    match = r"(words\.weight|layers\.2\.2\.bias): .*close\(\) what it returned and call it again.*has left its file"
    with pytest.raises(offload.ConfigError, match=match):
        loss_of(model, 1)
    in_file.close()
    model.head.weight = model.words.weight  # assign=True has untied them
    offload.weights_in_file(model, tmp_path)
    assert all(is_mapped(weight.data_ptr()) for weight in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.layers[2][2], "bias", None),
        lambda model: setattr(model.layers, "2", nn.Identity()),
        lambda model: setattr(model.layers[2], "2", nn.Linear(4 * WIDTH, WIDTH)),
        lambda model: nn.utils.parametrizations.spectral_norm(model.layers[2][2]),
        lambda model: setattr(model.layers[0][0], "weight", model.layers[2][0].weight),
    ],
)
def test_modules_may_change_afterwards(change: Callable[[Model], Any], tmp_path: Path) -> None:
    model, other = made(), made()
    offload.weights_in_file(model, tmp_path)
    for each in (model, other):
        torch.manual_seed(0)
        change(each)
        loss_of(each, 0).backward()
    assert same(model, other)
    gradients = [[weight.grad for weight in each.parameters() if weight.requires_grad] for each in (model, other)]
    assert all(map(torch.equal, *gradients))


def test_what_cannot_lie_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = made()
    addresses = [weight.data_ptr() for weight in model.parameters()]
    for folder in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(offload.ConfigError, match="path"):
            offload.weights_in_file(model, folder)
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
    with pytest.raises(offload.ConfigError, match="layers"):
        offload.weights_in_file(model, tmp_path, layers=[nn.Linear(2, 2)])
    model.layers[1][0].weight = nn.Parameter(model.layers[0][0].weight.detach())  # a tie that only its memory has
    with pytest.raises(offload.ConfigError, match=r"layers\.0\.0\.weight and layers\.1\.0\.weight, which share"):
        offload.weights_in_file(model, tmp_path)
    model = made()
    model.register_parameter("sparse", nn.Parameter(torch.eye(3).to_sparse()))
    with pytest.raises(offload.ConfigError, match=r"sparse: .*torch\.sparse_coo"):
        offload.weights_in_file(model, tmp_path)


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = distribute_module(made(), init_device_mesh("cpu", (1,)))
        with pytest.raises(offload.ConfigError, match=r"words\.weight: 'DTensor'.*not sharded"):
            offload.weights_in_file(model, tmp_path)
    finally:
        dist.destroy_process_group()


def test_a_model_lies_in_one_file(tmp_path: Path) -> None:
    model = made()
    home = offload.weights_in_file(model, tmp_path)
    for again in (model, model.layers[2]):
        with pytest.raises(offload.ConfigError, match="once, or close"):
            offload.weights_in_file(again, tmp_path)
    for other in (copy.deepcopy(model), model):
        home.close()
        offload.weights_in_file(other, tmp_path)
        assert torch.equal(loss_of(other, 0), loss_of(made(), 0))


def test_transformed_models_compute_the_same(tmp_path: Path) -> None:
    """Compiled, exported, and called with other tensors in the place of weights."""
    plain, model = made(), made()
    offload.weights_in_file(model, tmp_path)
    losses = [loss_of(torch.compile(each, backend="eager"), 0) for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    pairs = zip(plain.layers.parameters(), model.layers.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    others = {name: 2 * weight.detach() for name, weight in plain.named_parameters()}

    def computed(each: nn.Module, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(each, weights, (batch(0),)).sum()

    for way in (computed, lambda each, weights: torch.func.grad(partial(computed, each))(weights)["words.weight"]):
        assert torch.equal(way(plain, others), way(model, others))
    exported = torch.export.export(model, (batch(0),), strict=False).module()
    assert torch.equal(exported(batch(0)), plain(batch(0)))


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_updates_in_backward_are_refused(overlap: str, tmp_path: Path) -> None:
    model = made(torch.bfloat16)
    offload.weights_in_file(model, tmp_path)
    with (
        pytest.raises(offload.ConfigError, match="weights in a file"),
        optimizer_of(model, tmp_path, overlap=overlap),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_a_full_disk_changes_nothing(mounted: Callable[..., Path]) -> None:
    folder = mounted("tmpfs", "size=32k")
    model = made()
    with pytest.raises(offload.TierFullError, match=r"ENOSPC.*of weights"):
        offload.weights_in_file(model, folder)
    assert not any(is_mapped(weight.data_ptr()) for weight in model.parameters())
    assert same(model, made())
    assert os.listdir(folder) == []


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_drive_that_fails_is_an_error(is_whole: bool, tmp_path: Path) -> None:
    """A file that ends before its mapping reads as a drive does whose blocks cannot be read: by a signal."""
    model = made()
    home = offload.weights_in_file(model, tmp_path)
    loss_of(model, 0).backward()
    settings = {"host_memory": 0, "paths": [tmp_path], "subgroup_numel": 4096}
    kind = partial(offload.wrap, torch.optim.NAdam) if is_whole else offload.AdamW  # of whole parameters, or parts
    with kind(model.named_parameters(), lr=1e-2, offload=settings) as optimizer:
        os.truncate(home.file.descriptor, 0)
        with pytest.raises(offload.StepAbortedError) as raised:
            optimizer.step()
        assert isinstance(raised.value.__cause__, offload.TierError)
        assert "EIO" in str(raised.value.__cause__)
    with pytest.raises(offload.TierError, match=r"EIO.*weights that are mapped"):
        loss_of(model, 1)


@pytest.mark.parametrize("are_brought", [True, False])
def test_updates_wait_for_no_drive(are_brought: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as the kernel does: none where weights are brought before, and some where they are not."""
    model = made()
    file = offload.weights_in_file(model, tmp_path).file
    if not are_brought:
        monkeypatch.setattr(MappedWeights, "fault_in", lambda self: None)
    with optimizer_of(model, tmp_path) as optimizer:
        assert metrics.WEIGHT_FAULTS not in optimizer.metrics()
        faults = []
        for step in range(3):
            loss_of(model, step).backward()
            os.fsync(file.descriptor)
            file.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            optimizer.step()
            optimizer.zero_grad()
            faults.append(optimizer.metrics()[metrics.WEIGHT_FAULTS])
    assert (faults[-1] == faults[0]) == are_brought


def test_what_comes_next_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First by the order of the layers, later by what came last time."""
    model = made(recompute=True)
    home = offload.weights_in_file(model, tmp_path)
    numbers = {inner: number for number, modules in enumerate(units(model)) for inner in modules}
    parts = [next(modules[0].parameters()).data_ptr() - home.file.address for modules in units(model)]
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(
        ReadAheadThread, "read_ahead", lambda self, file, ranges: asked.append(("ask", parts.index(ranges[0][0])))
    )
    for name in ("fault_in", "advise_unneeded"):
        plain = getattr(MappedFile, name)

        def noted(
            self: MappedFile, offset: int, *rest: Any, name: str = name, plain: Any = plain, **options: Any
        ) -> None:
            if offset in parts:
                asked.append((name, parts.index(offset)))
            plain(self, offset, *rest, **options)

        monkeypatch.setattr(MappedFile, name, noted)
    assert [numbers[layer] for layer in model.layers] == [1, 2, 3, 4]
    for step in range(2):  # the second shows what follows a whole iteration
        loss_of(model, step).backward()
    asked.clear()
    loss_of(model, 2).backward()
    turns = [number for number, _ in itertools.groupby(number for name, number in asked if name == "fault_in")]
    # Words; layers; norm; the head, which is tied to the words; and back.
    assert turns == [0, 1, 2, 3, 4, 5, 0, 5, 4, 3, 2, 1, 0]
    for here, onwards in itertools.pairwise(turns):
        begins = asked.index(("fault_in", here))
        until = asked.index(("fault_in", onwards), begins)
        assert ("ask", onwards) in asked[begins:until]
        del asked[: until - 1]


class TestLayers:
    def test_of_lists_in_lists_the_outermost(self) -> None:
        inner = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
        model = nn.Module()
        model.first, model.list, model.last = nn.Linear(2, 2), nn.ModuleList(inner), nn.Linear(2, 2)
        assert find_layers(model) == inner
        assert [modules[0] for modules in units(model)] == [model.first, *inner, model.last]
        assert [modules[0] for modules in units(model, [model.last])][-1] is model.last
        assert sum(len(modules) for modules in units(model)) == 2 + 3 * 3

    def test_a_list_is_not_called_but_its_parts_are(self) -> None:
        lists = [nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]) for _ in range(3)]
        model = nn.Module()
        model.layers = nn.ModuleList(lists)
        assert find_layers(model) == lists
        assert [modules[0] for modules in units(model)] == [part for each in lists for part in each]

    def test_what_repeats_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Embedding(2, 2), nn.Conv1d(2, 2, 1))
        assert find_layers(model) == []
        assert len(units(model)) == 4
        assert find_layers(nn.Linear(2, 2)) == []
        assert len(units(nn.Linear(2, 2))) == 1

    def test_a_shared_layer_is_one(self, tmp_path: Path) -> None:
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, layer, layer)
        assert len(units(model)) == 1
        home = WeightsInFile(model, tmp_path)
        model(torch.ones(1, 4)).sum().backward()
        assert home.nbytes >= 4 * 20
