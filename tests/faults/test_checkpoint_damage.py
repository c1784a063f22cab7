"""Damage of every kind to checkpoints: always an error that names file and parameter, never wrong bits or a crash."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import FaultyTier

import offload
from offload import cli
from offload.checkpoint import saves
from offload.checkpoint.manifest import (
    COMMIT_NAME,
    CommitRecord,
    decode,
    seal,
    seal_commit,
    unseal,
    unseal_commit,
)
from offload.checkpoint.reader import Checkpoint
from offload.protocols import Tier, TileRequest
from offload.session import setup
from offload.tiers import SLOT_HEADER_BYTES, open_tier
from offload.tiers.common import digest_of

NAMES = ("first", "second", "third")


def make(paths: list[Path], seed: int = 0, **config: Any) -> tuple[list[torch.nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in (1500, 1000, 2000)]
    settings = {"host_memory": 0, "paths": paths, "subgroup_numel": 1024, **config}
    return parameters, offload.AdamW(
        list(zip(NAMES, parameters, strict=True)), offload=offload.OffloadConfig(**settings)
    )


def step(parameters: list[torch.nn.Parameter], optimizer: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
    optimizer.step()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "path"
    path.mkdir()
    parameters, optimizer = make([path])
    step(parameters, optimizer)
    optimizer.save_checkpoint(tmp_path / "ck", extra={"a": 1})
    optimizer.close()
    return tmp_path / "ck"


def manifest_of(folder: Path) -> Path:
    (found,) = folder.glob("manifest-*.json")
    return found


def tiles_of(folder: Path) -> Path:
    (found,) = (folder.parent / "path").glob("*/tiles")
    return found


def refuse(folder: Path, *words: str, verify: bool = True) -> str:
    """Require that loading fails with an error that has these words, and that `offload verify` sees it too."""
    _, optimizer = make([], host_memory=None)
    with optimizer, pytest.raises(offload.CheckpointError) as caught:
        optimizer.load_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)
    if verify:
        assert cli.main(["verify", str(folder), "--quiet"]) == 1
    return str(caught.value)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), offset)


def slots(folder: Path) -> list[tuple[str, str, int, int]]:
    """Return (parameters, tensor, offset, bytes) of every tile."""
    with Checkpoint(folder) as opened:
        (manifest,) = opened.manifests
        return [
            (manifest.parameters_of(tile), str(tile), ref.offset, manifest.tile_bytes[tile])
            for tile, ref in manifest.tiles.items()
        ]


def test_every_part_of_a_slot(checkpoint: Path) -> None:
    """A bit flipped in its header, in the padding, and at the ends of the payload."""
    names, _, offset, nbytes = slots(checkpoint)[4]
    for place in (0, 40, 4092, SLOT_HEADER_BYTES, SLOT_HEADER_BYTES + nbytes - 1):
        flip(tiles_of(checkpoint), offset + place, bit=place % 8)
        message = refuse(checkpoint, names, str(tiles_of(checkpoint).parent))
        assert "damaged" in message or "checksum" in message, f"byte {place}: {message}"
        flip(tiles_of(checkpoint), offset + place, bit=place % 8)
    _, optimizer = make([], host_memory=None)
    with optimizer:
        assert optimizer.load_checkpoint(checkpoint) == {"a": 1}


def test_swapped_and_missing_slots(checkpoint: Path) -> None:
    (names, _, first, nbytes), (_, _, second, _) = slots(checkpoint)[:2]
    with open(tiles_of(checkpoint), "r+b") as file:
        left = os.pread(file.fileno(), SLOT_HEADER_BYTES + nbytes, first)
        right = os.pread(file.fileno(), SLOT_HEADER_BYTES + nbytes, second)
        os.pwrite(file.fileno(), right, first)
        os.pwrite(file.fileno(), left, second)
    refuse(checkpoint, names.split()[-1], "belongs to another tile")
    os.truncate(tiles_of(checkpoint), 3 * SLOT_HEADER_BYTES)
    refuse(checkpoint)
    os.truncate(tiles_of(checkpoint), 0)
    refuse(checkpoint, "the store ends before the slot does")


def test_files_that_are_not_there(checkpoint: Path) -> None:
    manifest, tiles = manifest_of(checkpoint), tiles_of(checkpoint)
    (extra,) = checkpoint.glob("extra-*")
    for file in (extra, manifest):
        content = file.read_bytes()
        file.unlink()
        refuse(checkpoint, file.name, "missing")
        file.write_bytes(content)
    store = tiles.parent
    store.rename(store.with_name("elsewhere"))
    message = refuse(checkpoint, store.name, "cannot be opened", "no such store is there", "`offload fetch ")
    assert "ENOENT" not in message
    store.with_name("elsewhere").rename(store)
    (checkpoint / COMMIT_NAME).unlink()
    refuse(checkpoint, "never committed")


@pytest.mark.parametrize("name", ["manifest", "extra", COMMIT_NAME])
def test_small_files_cut_or_changed_anywhere(checkpoint: Path, name: str) -> None:
    (file,) = checkpoint.glob(f"{name}*")
    content = file.read_bytes()
    rng = random.Random(0)
    cuts = [0, 1, len(content) // 2, len(content) - 1]
    for cut in cuts:
        file.write_bytes(content[:cut])
        refuse(checkpoint, str(checkpoint), verify=False)
    file.write_bytes(content + b"x")
    refuse(checkpoint, file.name, verify=False)
    for place in rng.sample(range(len(content)), min(len(content), 20)):
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        refuse(checkpoint, str(checkpoint), verify=False)


def test_the_store_of_another_run_under_this_runs_name(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    parameters, optimizer = make([other], seed=5)
    step(parameters, optimizer, seed=7)
    optimizer.save_checkpoint(tmp_path / "ck2")
    optimizer.close()
    (theirs,) = other.glob("*/tiles")
    shutil.copy(theirs, tiles_of(checkpoint))
    refuse(checkpoint, "belongs to another tile, step or store")


def nested(value: Any) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yield a setter and the value of everything inside a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield (lambda new, key=key: value.__setitem__(key, new)), inner
        yield from nested(inner)


STRANGE = [None, True, -1, 1, 1 << 40, 1 << 62, 1 << 70, 0.5, float("nan"), "", "x", "../x", [], [1], {}, {"a": 1}]


@pytest.mark.slow
def test_fuzzed_manifests_never_crash(checkpoint: Path) -> None:
    """Bodies with right checksums and wrong fields: an error, or a manifest that still makes sense."""
    content = manifest_of(checkpoint).read_bytes()
    rng = random.Random(1)
    refused = 0
    for _ in range(1500):
        body = unseal("manifest", content, "x")
        places = list(nested(body))
        for _ in range(rng.choice((1, 1, 2))):
            put, old = rng.choice(places)
            put(rng.choice([*STRANGE, old + 1 if isinstance(old, int) else old]))
        if rng.random() < 0.2:
            body.pop(rng.choice(list(body)))
        try:
            decode(seal("manifest", body), "the manifest")
        except offload.CheckpointError as error:
            refused += "the manifest" in str(error)
    assert refused > 1000
    for _ in range(3000):  # and bytes of any kind
        noise = bytearray(content if rng.random() < 0.7 else rng.randbytes(200))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(noise))
            noise[at : at + rng.choice((0, 1, 8))] = rng.randbytes(rng.randrange(9))
        for read in (decode, unseal_commit):
            try:
                read(bytes(noise), "the manifest")
            except offload.CheckpointError:
                continue
            assert bytes(noise) == content
    commit = CommitRecord("a" * 32, 3, ("b" * 32,))
    assert unseal_commit(seal_commit(commit), "x") == commit


def say(file: Path, change: Callable[[Any], None]) -> None:
    """Change a file's body and make its checksum right again."""
    content = file.read_bytes()
    kind = json.loads(content.partition(b"\n")[0])["format"].removeprefix("offload-")
    body = unseal(kind, content, "x")
    change(body)
    file.write_bytes(seal(kind, body))


def in_depth(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HALF = "\ud800"
"""Half a surrogate pair: JSON can say it, and nothing can write it."""


NEVER_SAVED: list[dict[str, Any]] = [
    {"params": []},
    {"lr": {"tensor": "x"}},
    {"lr": {"tensor": 0.1, "more": 1}},
    {"lr": {"tensor": None}},
    {"lr": {"tensor": float("nan")}},
    {"lr": {}},
    {"lr": [0.1]},
    {"lr": -1.0},
    {"lr": float("inf")},
    {"lr": 10**400},
    {"lr": "fast"},
    {"lr": None},
    {"betas": [0.9, 10**400]},
    {"betas": [0.9]},
    {"betas": [0.9, {"tensor": 0.99}]},
    {"betas": 0.9},
    {"maximize": "no"},
    {"weight_decay": []},
    {"own": {"a": 1}},
    {"own": in_depth(10)},
    {"own": in_depth(200)},
    {"own": HALF},
    {"of_tensor": "x"},
    {"of_tensor": [1.0]},
    {"of_tensor": 10**400},
    {"of_count": float("nan")},
    {HALF: 1},
]


def test_hyperparameters_that_were_never_saved_are_refused_and_change_nothing(checkpoint: Path) -> None:
    manifest = manifest_of(checkpoint).read_bytes()
    parameters, optimizer = make([], host_memory=None)
    with optimizer:
        group = optimizer.param_groups[0]
        group |= {"of_tensor": torch.tensor(0.5), "of_count": torch.tensor(3), "lr": 0.25}
        step(parameters, optimizer, seed=3)
        before = {**group, "params": list(parameters)}
        state = [optimizer.state_for(parameter) for parameter in parameters]
        for hyperparameters in NEVER_SAVED:
            manifest_of(checkpoint).write_bytes(manifest)
            say(
                manifest_of(checkpoint),
                lambda body, given=hyperparameters: body["metadata"]["groups"][0].update(given),
            )
            with pytest.raises(offload.CheckpointError):
                optimizer.load_checkpoint(checkpoint)
            assert repr(group) == repr(before)
        for parameter, then in zip(parameters, state, strict=True):
            assert all(torch.equal(tensor, then[name]) for name, tensor in optimizer.state_for(parameter).items())
        step(parameters, optimizer, seed=4)


def test_entries_that_say_nothing_about_this_optimizer_are_left_out(checkpoint: Path) -> None:
    strange = {"foreach": True, "fused": {"a": []}, "param_names": ["a"], "own": [1, "a", None], "lr": 0.125}
    say(manifest_of(checkpoint), lambda body: body["metadata"]["groups"][0].update(strange))
    _, optimizer = make([], host_memory=None)
    with optimizer:
        optimizer.load_checkpoint(checkpoint)
        (group,) = optimizer.param_groups
        assert (group["lr"], group["own"], group["param_names"]) == (0.125, [1, "a", None], list(NAMES))
        assert not {"foreach", "fused"} & group.keys()


SAID: list[Callable[[Any], None]] = [
    lambda body: body["parameters"][0].__setitem__(0, HALF),
    lambda body: body["parameters"][0].__setitem__(0, "a\0b"),
    lambda body: body["parameters"][0].__setitem__(7, [1] * 1_000_000),
    lambda body: body["parameters"][0].__setitem__(1, 10**400),
    lambda body: body["parameters"][0].__setitem__(1, in_depth(500)),
    lambda body: body["stores"][0].__setitem__(0, HALF),
    lambda body: body["stores"][0].__setitem__(1, HALF),
    lambda body: body["stores"][0].__setitem__(1, "a\0b"),
    lambda body: body["stores"][0].__setitem__(1, "/" + "a" * 5000),
    lambda body: body["extra"].__setitem__(0, HALF),
    lambda body: body["extra"].__setitem__(0, "a\0b"),
    lambda body: body["extra"].__setitem__(0, "a" * 5000),
    lambda body: body["extra"].__setitem__(1, 10**400),
    lambda body: body.update(metadata={"optimizer": in_depth(300)}),
    lambda body: body.update(metadata={"optimizer": HALF}),
    lambda body: body.update(step=10**4000),
    lambda body: body.update(stores=in_depth(400)),
    lambda body: body.update(tiles=in_depth(400)),
    lambda body: body.update(ranks=10**400),
]


def test_what_json_can_say_and_a_checkpoint_cannot(checkpoint: Path) -> None:
    manifest = manifest_of(checkpoint).read_bytes()
    for change in SAID:
        manifest_of(checkpoint).write_bytes(manifest)
        say(manifest_of(checkpoint), change)
        refuse(checkpoint)


def test_json_that_python_cannot_read(checkpoint: Path) -> None:
    unreadable = [b"[" * 100_000, b'{"format":' * 100_000, b"9" * 5000, b'{"version": ' + b"9" * 5000]
    for name, content in itertools.product((COMMIT_NAME, manifest_of(checkpoint).name), unreadable):
        kind = "commit" if name == COMMIT_NAME else "manifest"
        kept = (checkpoint / name).read_bytes()
        head = json.loads(seal(kind, {}).partition(b"\n")[0])
        checksum = {"nbytes": len(content), "crc32c": digest_of(content)}
        for whole in (content, json.dumps({**head, **checksum}).encode() + b"\n" + content):
            (checkpoint / name).write_bytes(whole)
            refuse(checkpoint)
        (checkpoint / name).write_bytes(kept)


def test_metadata_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    _, optimizer = make([], host_memory=None)
    with optimizer:
        for value, words in ((in_depth(40), "metadata is nested"), (HALF, "surrogates")):
            optimizer.engine.checkpoints.save(offload.SaveRequest(tmp_path / "ck", metadata={"a": value}))
            with pytest.raises(offload.CheckpointError, match=words):
                optimizer.wait_checkpoint()


def test_load_that_finds_damage_breaks_the_session_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    _, _, offset, _ = slots(checkpoint)[-1]
    flip(tiles_of(checkpoint), offset + SLOT_HEADER_BYTES)
    parameters, optimizer = make([], host_memory=None, seed=3)
    with optimizer:
        with pytest.raises(offload.CheckpointError, match="into a new optimizer"):
            optimizer.load_checkpoint(checkpoint)
        with pytest.raises(offload.SessionBrokenError):
            step(parameters, optimizer)


@pytest.mark.parametrize("tensor", ["master", "exp_avg"])
def test_damage_where_the_checkpoint_is_gone_on_from_is_found_before_it_is_used(
    checkpoint: Path, tmp_path: Path, tensor: str
) -> None:
    """Masters are read at once, as weights are made from them; moments when they are first updated."""
    _, _, offset, _ = next(slot for slot in slots(checkpoint) if slot[0].startswith(f"{tensor} of {NAMES[0]}"))
    flip(tiles_of(checkpoint), offset + SLOT_HEADER_BYTES)
    parameters, optimizer = make([tmp_path / "path"], seed=3)
    words = [f"{tensor} of {NAMES[0]}", "offload-", str(tmp_path / "path")]
    with optimizer:
        if tensor == "master":
            with pytest.raises(offload.CheckpointError, match="into a new optimizer") as caught:
                optimizer.load_checkpoint(checkpoint)
        else:
            optimizer.load_checkpoint(checkpoint)
            with pytest.raises(offload.StepAbortedError) as caught:
                step(parameters, optimizer, 2)
            assert caught.value.checkpoint == str(checkpoint)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        with pytest.raises(offload.SessionBrokenError):
            step(parameters, optimizer)
    assert cli.main(["verify", str(checkpoint), "--quiet"]) == 1  # all of it is still there
    flip(tiles_of(checkpoint), offset + SLOT_HEADER_BYTES)
    _, optimizer = make([tmp_path / "path"], seed=3)
    with optimizer:
        optimizer.load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("host_memory", "code", "lasting"),
    [(0, errno.EIO, False), ("1MiB", errno.ENOSPC, False), ("1MiB", errno.EIO, True), (0, errno.ENOSPC, True)],
)
def test_a_write_for_a_checkpoint_that_fails_is_tried_again_and_then_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_memory: Any, code: int, lasting: bool
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    armed: list[FaultyTier] = []

    class Failing(FaultyTier):
        def write(self, request: TileRequest) -> None:
            if self in armed:
                if not lasting:
                    armed.clear()
                self._queue.post(request.op, code, request.offset)
                return
            super().write(request)

    opened: list[Failing] = []

    def open_failing(name: str, store: uuid.UUID, queue: Any, **settings: Any) -> Failing:
        opened.append(Failing(open_tier(name, store, queue, **settings), queue, []))
        return opened[-1]

    monkeypatch.setattr(setup, "open_tier", open_failing)
    several = lasting or code == errno.ENOSPC  # without another path there is nowhere to go
    parameters, optimizer = make(paths if several else paths[:1], host_memory=host_memory)
    with optimizer:
        step(parameters, optimizer)
        armed.append(opened[0])
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        armed.clear()
        state = [parameter.detach().clone() for parameter in parameters]
        step(parameters, optimizer, 2)  # the path is still used
        optimizer.engine._parts.machine.check()
    monkeypatch.undo()
    assert cli.main(["verify", str(tmp_path / "ck"), "--quiet"]) == 0
    other, optimizer = make([], host_memory=None, seed=4)
    with optimizer:
        optimizer.load_checkpoint(tmp_path / "ck")
        assert all(torch.equal(left, right) for left, right in zip(state, other, strict=True))


def test_a_directory_that_is_removed_under_a_running_session(tmp_path: Path) -> None:
    """Open files outlive their names: training goes on; a checkpoint that needs the directory is refused."""
    path = tmp_path / "path"
    path.mkdir()
    expected, optimizer = make([], host_memory=None)
    with optimizer:
        for number in range(4):
            step(expected, optimizer, number)
    parameters, optimizer = make([path])
    with optimizer:
        step(parameters, optimizer, 0)
        shutil.rmtree(path)
        step(parameters, optimizer, 1)
        optimizer.save_checkpoint(tmp_path / "ck")
        with pytest.raises(offload.CheckpointError, match="path/offload-"):
            optimizer.wait_checkpoint()
        assert not (tmp_path / "ck" / "COMMIT").exists()
        step(parameters, optimizer, 2)
        optimizer.save_checkpoint(tmp_path / "copy", copy=True)
        optimizer.wait_checkpoint()
        step(parameters, optimizer, 3)
        assert all(torch.equal(left, right) for left, right in zip(parameters, expected, strict=True))
    other, optimizer = make([], host_memory=None, seed=4)
    with optimizer:
        optimizer.load_checkpoint(tmp_path / "copy")
        step(other, optimizer, 3)
        assert all(torch.equal(left, right) for left, right in zip(other, expected, strict=True))


def test_an_interrupt_while_a_copy_is_opened_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    parameter = torch.nn.Parameter(torch.ones(100))
    plain = saves.open_tier

    def interrupted(*arguments: Any, **options: Any) -> Tier:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        return plain(*arguments, **options)

    with offload.AdamW([parameter], offload=offload.OffloadConfig(paths=[tmp_path])) as optimizer:
        parameter.grad = torch.ones(100)
        optimizer.step()
        monkeypatch.setattr(saves, "open_tier", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.save_checkpoint(folder, copy=True)
        monkeypatch.setattr(saves, "open_tier", plain)
        optimizer.wait_checkpoint()
        assert list(folder.glob("offload-*"))  # it was handed over, and is whole
        optimizer.save_checkpoint(folder)
        optimizer.wait_checkpoint()
        assert not list(folder.glob("offload-*"))


@pytest.mark.parametrize("when", ["open", "before it returns", "behind training"])
def test_what_ends_a_save_alone_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The tier's error is its cause and in its message, whichever call raises it and in `on_done`."""
    full = offload.errors.TierFullError("write", tier="file", path="there", errno=errno.ENOSPC)

    class Full:
        """A store in the checkpoint's folder that takes nothing."""

        def __init__(self, tier: Tier) -> None:
            self.inner = tier

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def write(self, request: TileRequest) -> None:
            raise full

    def opened(*arguments: Any, **settings: Any) -> Any:
        if when == "open":
            raise full
        return Full(open_tier(*arguments, **settings))

    (tmp_path / "path").mkdir()
    dtype = torch.float32 if when == "before it returns" else torch.bfloat16  # masters that are weights come first
    weight = torch.nn.Parameter(torch.ones(3000, dtype=dtype, device="cpu"))
    told: list[Any] = []
    ended = threading.Event()

    def on_done(error: BaseException | None) -> None:
        told.append(error)
        ended.set()

    config = {"host_memory": 0, "paths": [tmp_path / "path"], "subgroup_numel": 1024}
    with offload.AdamW([weight], offload=config) as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        monkeypatch.setattr(saves, "open_tier", opened)

        def save() -> None:
            optimizer.save_checkpoint(tmp_path / "ck", copy=True, on_done=on_done)
            assert when == "behind training"
            optimizer.wait_checkpoint()

        with pytest.raises(offload.CheckpointError, match=r"no checkpoint was written to .*/ck: .*ENOSPC") as caught:
            save()
        assert isinstance(caught.value.__cause__, offload.TierError)
        if when != "open":  # nothing had begun there
            assert ended.wait(60)
            assert isinstance(told[0], offload.CheckpointError)
        monkeypatch.setattr(saves, "open_tier", open_tier)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "ck", copy=True)
        optimizer.wait_checkpoint()


def test_a_session_that_breaks_while_a_copy_is_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to the copy's store land with errors when it has been closed; the path's error is what counts."""
    failing = False

    class Wrapped:
        def __init__(self, tier: Tier, queue: Any) -> None:
            self.inner = tier
            self.queue = queue

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Failing(Wrapped):
        def write(self, request: TileRequest) -> None:
            if failing:
                self.queue.post(request.op, errno.EIO, request.offset)
            else:
                self.inner.write(request)

    class Sink(Wrapped):
        """Answers when it is closed."""

        held: list[int] = []  # noqa: RUF012
        started = threading.Event()

        def write(self, request: TileRequest) -> None:
            self.held.append(request.op)
            self.started.set()

        def close(self) -> None:
            while self.held:
                self.queue.post(self.held.pop(), errno.ENOSPC)
            self.inner.close()

    def opened(kind: type) -> Any:
        return lambda path, store, queue, **settings: kind(open_tier(path, store, queue, **settings), queue)

    monkeypatch.setattr(setup, "open_tier", opened(Failing))
    monkeypatch.setattr(saves, "open_tier", opened(Sink))
    (tmp_path / "path").mkdir()
    parameters, optimizer = make([tmp_path / "path"])
    with optimizer:
        step(parameters, optimizer)
        optimizer.save_checkpoint(tmp_path / "copy", copy=True)
        assert Sink.started.wait(60)
        failing = True
        with pytest.raises(offload.StepAbortedError) as caught:
            step(parameters, optimizer, 2)
        assert isinstance(caught.value.cause, offload.TierError)
        assert "EIO" in str(caught.value)
        with pytest.raises(offload.CheckpointError, match="EIO"):
            optimizer.wait_checkpoint()


def test_a_read_only_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "path"
    path.mkdir()
    parameters, optimizer = make([path])
    step(parameters, optimizer)
    optimizer.save_checkpoint(tmp_path / "ck", copy=True)
    optimizer.close()
    if os.geteuid() == 0:
        place = tmp_path / "readonly"
        place.mkdir()
        command = ["mount", "--bind", "-o", "ro", str(tmp_path / "ck"), str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no mounts here")
    else:
        place = tmp_path / "ck"
        place.chmod(0o500)
    try:
        other, optimizer = make([], host_memory=None, seed=4)
        with optimizer:
            optimizer.load_checkpoint(place)
            assert all(torch.equal(left, right) for left, right in zip(parameters, other, strict=True))
            with pytest.raises(offload.CheckpointError, match=r"readonly|ck"):
                optimizer.save_checkpoint(place)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(place)], check=True)
