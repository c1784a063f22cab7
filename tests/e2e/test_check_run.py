"""`offload check-run`: scripts of users' beside themselves in memory, and beside torch's own optimizers."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prepared
import pytest
import torch

from offload.cli import check_run, checked, main

SCRIPT = """
import argparse, pathlib, torch, offload
options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=9)
options.add_argument("--settings", type=eval, default={})
options = options.parse_args()
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).bfloat16()
config = {"host_memory": 0, "paths": ["disk"], "subgroup_numel": 4096, **options.settings}
optimizer = offload.AdamW(model.named_parameters(), lr=1e-3, offload=config)
if config.get("overlap") == "both":
    optimizer.overlap_forward(model)
extra = 0.0
for step in range(options.steps):
    #begin
    x = torch.randn(8, 64).bfloat16()
    for _ in range(2):
        (model(x + extra) - x).square().mean().backward()
    optimizer.clip_grad_norm_(0.05)
    #end
    optimizer.step()
    optimizer.zero_grad()
    with open("steps", "a") as file:
        file.write(f"{step}\\n")
"""


@pytest.fixture
def check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Any:
    """Return a function that checks a script, and returns the status, the outcome and what went to stderr."""
    if "does_not_change" not in request.node.name:  # prepared processes have an environment of their own
        monkeypatch.setattr(sys, "executable", prepared.python())
        monkeypatch.setattr(check_run, "REPEATABLE", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "disk").mkdir()

    def run(
        *options: str, name: str = "train.py", text: str = SCRIPT, steps: int | None = 3, before: tuple[str, ...] = ()
    ) -> tuple[int, Any, str]:
        (tmp_path / name).write_text(text)
        given = [] if steps is None else ["--steps", str(steps)]
        status = main(["check-run", "--json", *given, *before, name, *options])
        said = capfd.readouterr()
        assert not list((tmp_path / "disk").iterdir())
        return status, json.loads(said.out) if said.out else None, said.err

    return run


def test_a_script_that_offloading_does_not_change(check: Any, tmp_path: Path) -> None:
    """Its checkpoints are its own business, and so are its checks of what lies where."""
    added = """
    optimizer.save_checkpoint("ck", extra={"step": step})
    optimizer.wait_checkpoint()
    assert optimizer.load_checkpoint("ck") == {"step": step}
    #end"""
    status, outcome, _ = check("--settings", "{'overlap': 'both'}", text=SCRIPT.replace("    #end", added))
    assert status == 0
    assert outcome["different"] is False
    assert outcome["metrics"]["streamed_bytes"] > 0
    assert 0 <= outcome["share_of_allowed"] < 0.5
    assert (tmp_path / "steps").read_text() == 2 * "0\n1\n"  # the run ends inside of the third step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "steps", "train.py"]


def test_a_format_that_rounds_is_near_torch(check: Any) -> None:
    status, outcome, _ = check("--settings", "{'state_format': 'compact8'}", steps=8)
    assert (status, outcome["different"]) == (0, False)
    assert 0 < outcome["share_of_allowed"] < 0.5


@pytest.mark.parametrize("name", ["train.py", "offload.json"])
def test_settings_for_a_gpu_are_rehearsed_on_a_cpu(check: Any, name: str) -> None:
    """Those that `offload plan --advise` prints: refused where no weight is on a GPU, unless that is asked for."""
    config = {"gpu_memory": "1GiB", "placement": 0.25, "keep_grads": False, "state_format": "compact8"}
    given = {"host_memory": 0, "paths": ["disk"], "threads": 1} | config
    script = SCRIPT.replace("**options.settings}", f"**{config}}}")
    text = {"train.py": script, "offload.json": json.dumps(given)}[name]
    status, _, said = check(name=name, text=text)
    assert status != 0
    assert "not on a GPU" in said
    status, outcome, _ = check(name=name, text=text, before=("--on-cpu",))
    assert (status, outcome["different"]) == (0, False)
    assert outcome["metrics"]["streamed_bytes"] > 0
    assert outcome["found"][-1] == "on the CPU: gpu_memory, placement, keep_grads of the settings were left out"


CALLS = (
    "torch.nn.utils.clip_grad_norm_(model.parameters(),",
    "torch.nn.utils.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0); optimizer.clip_grad_norm_(",
)


@pytest.mark.parametrize("call", CALLS)
def test_a_rehearsal_finds_the_clip_that_would_find_no_gradients(check: Any, call: str) -> None:
    script = SCRIPT.replace("**options.settings}", "'keep_grads': False}")
    script = script.replace("optimizer.clip_grad_norm_(", call)
    status, outcome, _ = check(text=script, before=("--on-cpu",))
    clips_nothing = "model" in call
    assert (status, outcome["different"]) == (int(clips_nothing), clips_nothing)
    assert (
        any(said.startswith("torch's clip_grad_norm_ DIFFERS on a GPU") for said in outcome["found"]) == clips_nothing
    )


def test_a_weight_that_is_used_before_it_has_come_shows(check: Any) -> None:
    text = SCRIPT.replace("#begin", "extra = float(model[2].weight.detach().float().mean())")
    status, outcome, _ = check("--settings", "{'overlap': 'both'}", text=text)
    assert (status, outcome["different"]) == (1, True)
    assert outcome["found"][0].startswith("as it is and in memory DIFFER, first in gradient of 0.weight in step 2: ")
    assert "is nan, and in memory " in outcome["found"][0]
    assert "deterministic" not in " ".join(outcome["found"])


AVERAGES = """
import beside
class Average:
    def __init__(self):
        self.kept = {name: weight.detach().float() for name, weight in model.named_parameters()}
def shadow_of(weight):
    shadow = weight.detach().clone()
    def update():
        shadow.copy_(weight.detach())
    return update
average, swa, update = Average(), torch.optim.swa_utils.AveragedModel(model), shadow_of(model[2].bias)
beside.seen = torch.optim.SGD([torch.nn.Parameter(torch.zeros(64))], lr=0.1, momentum=0.5)
def main():
    local = [weight.detach().clone() for weight in model.parameters()]
    for step in range(9):
        x = torch.randn(8, 64).bfloat16()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.settings.get("overlap") == "both" and options.steps:
            optimizer.finish()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                average.kept[name].lerp_(weight.float(), 0.1)
            local[1].copy_(model[0].bias)
            beside.seen.param_groups[0]["params"][0].grad = model[1].bias.float()
        swa.update_parameters(model)
        update()
        beside.seen.step()
main()
"""


def test_an_average_of_weights_that_have_not_come_is_named(check: Any, tmp_path: Path) -> None:
    """Wherever the script has it; no gradient and no weight differs."""
    (tmp_path / "beside.py").write_text("")
    text = SCRIPT.partition("extra = ")[0] + AVERAGES
    status, outcome, _ = check("--steps", "0", "--settings", "{'overlap': 'both'}", text=text)
    assert (status, outcome["different"]) == (1, True)
    assert outcome["found"][0].startswith("as it is and in memory: the same bits in ")
    assert "element 0 is nan, and in memory " in outcome["found"][1]
    said = " ".join(outcome["found"])
    places = ("average.kept['0.weight']", "swa.module.1.weight", "update.shadow", "local[1] in main()")
    for name in (*places, "beside.seen.state[0]['momentum_buffer']"):
        assert name in said
    assert "optimizer.finish() first" in said
    assert "two runs" not in said
    status, outcome, _ = check("--steps", "1", "--settings", "{'overlap': 'both'}", text=text)
    assert (status, outcome["different"]) == (0, False), outcome["found"]


def test_nan_in_both_is_no_distance(check: Any) -> None:
    added = "paths = torch.tensor([math.nan, float(len(optimizer.config.paths))])\n    #end"
    status, outcome, _ = check(text="import math\n" + SCRIPT.replace("#end", added))
    assert (status, outcome["different"]) == (1, True)
    assert "paths DIFFERS at the end: 1 of 2 elements, by up to 1 (" in outcome["found"][1]
    assert outcome["found"][1].endswith("; element 1 is 1.0, and in memory 0.0")


def test_a_tensor_without_a_seed_is_named_as_such(check: Any) -> None:
    added = "drawn = torch.rand(3, generator=torch.Generator().manual_seed(torch.Generator().seed()))\n    #end"
    status, outcome, _ = check(text=SCRIPT.replace("#end", added))
    assert (status, outcome["different"]) == (1, True)
    assert outcome["found"][1] == "the script's drawn DIFFERS at the end, and so it does between two runs of one kind"
    assert outcome["found"][2].endswith("(no seed? a time?) says nothing of offloading")


def test_what_a_script_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cycles end, nothing is looked into that the standard library has made, and there is a bound that is told."""
    tensors = [torch.full((2,), number) for number in range(6)]
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    holder = SimpleNamespace(slots=(tensors[0], {1: tensors[1]}, {tensors[2]: tensors[2]}), again=tensors[0])
    holder.itself = holder
    model = torch.nn.ModuleDict({"part": torch.nn.Linear(1, 1, bias=False)})
    model.kept = tensors[3]
    logger = logging.Logger("name")
    logger.tensor = tensors[4]
    kind = type("Kind", (), {"shared": tensors[5], "__module__": "__main__"})
    vars(script).update(holder=holder, model=model, logger=logger, Kind=kind, torch=torch, none=None)
    found, is_whole = checked.script_tensors(str(tmp_path / "train.py"), None)
    assert is_whole
    names = {
        "holder.again",
        "holder.slots[1][1]",
        "holder.slots[2][0]",
        "model.part.weight",
        "model.kept",
        "Kind.shared",
    }
    assert {*found} == names
    monkeypatch.setattr(checked, "MOST_OBJECTS", 6)
    fewer, is_whole = checked.script_tensors(str(tmp_path / "train.py"), None)
    assert not is_whole
    assert {*fewer} < names


def test_a_script_that_differs_from_itself_is_told(check: Any) -> None:
    text = SCRIPT.replace("torch.manual_seed(1)", "torch.seed()")
    status, outcome, _ = check(text=text)
    assert (status, outcome["different"]) == (1, True)
    said = " ".join(outcome["found"])
    assert (
        "two runs as it is differ, first in gradient of 0.weight in step 1: the script is not deterministic" in said
    )
    assert "two runs in memory differ" in said


def test_an_update_that_is_not_torchs_is_told(check: Any) -> None:
    planted = """import offload.rules
    kind = type(offload.rules.ADAMW)
    values = kind.values
    kind.values = lambda rule, group: values(rule, {**group, "betas": (0.8, 0.999)})
    """.replace("    ", "")
    status, outcome, _ = check(text=planted + SCRIPT)
    assert (status, outcome["different"]) == (1, True)
    assert outcome["found"][0].startswith("as it is and in memory: the same bits")
    assert "torch's optimizer DIFFERS, first in the master of 0.weight in step 2: " in outcome["found"][1]


OTHERS = """
import torch, offload
torch.manual_seed(1)
weights = [torch.nn.Parameter(torch.randn(5000)) for _ in range(4)]
kinds = [offload.SGD, offload.Adagrad, offload.Adam, offload.Lion]
config = {"host_memory": 0, "paths": ["disk"]}
optimizers = [kind([weight], offload=config) for kind, weight in zip(kinds, weights)]
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
optimizers[0].param_groups[0]["momentum"] = 0.9
while True:
    for optimizer, weight in zip(reversed(optimizers), reversed(weights)):
        def closure():
            optimizer.zero_grad()
            loss = (weight - torch.randn(5000)).square().sum()
            loss.backward()
            return loss
        assert optimizer.step(closure) > 0
    schedule.step()
    with torch.no_grad():
        weights[1].clamp_(-1, 1)
"""


def test_other_optimizers_closures_and_changed_weights(check: Any) -> None:
    status, outcome, _ = check(text=OTHERS.replace("reversed", ""))
    assert (status, outcome["different"]) == (0, False)
    assert outcome["share_of_allowed"] < 0.5
    status, outcome, _ = check(text=OTHERS.replace("kinds = [", "kinds = 4 * [offload.Lion] or ["))
    assert status == 0
    assert outcome["found"][1] == "torch has no such optimizer to compare with"


@pytest.mark.slow
def test_settings_of_a_file(check: Any) -> None:
    settings = {"paths": ["disk"], "host_memory": "64GiB", "overlap": "forward", "state_format": "compact16"}
    given = ["--params", "100k", "--subgroup-numel", "16k"]
    status, outcome, _ = check(*given, name="offload.json", text=json.dumps(settings), steps=2)
    assert (status, outcome["different"]) == (0, False)
    assert outcome["script"] == "offload.json"


def test_a_script_that_takes_fewer_steps_is_checked_for_these(check: Any) -> None:
    status, outcome, _ = check("--steps", "2", steps=None)
    assert (status, outcome["different"], outcome["steps"]) == (0, False, 2)
    status, outcome, said = check("--steps", "1", steps=None)
    assert (status, outcome) == (2, None)
    assert "the script ended after 1" in said


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        (
            "raise ValueError('no data')",
            1,
            "ValueError: no data\noffload check-run: run as it is, it failed after 0 steps",
        ),
        ("print('hello')", 1, "no optimizer of this package had taken a step"),
        ("import sys\nsys.modules['deepspeed'] = sys", 1, "had taken a step; DeepSpeed's trainings, which"),
        (
            SCRIPT.replace("default=9", "default=2"),
            2,
            "--steps: 3 cannot be used; the script ended after 2: give no more",
        ),
    ],
    ids=["fails", "has none", "has one of DeepSpeed", "ends"],
)
def test_a_script_that_cannot_be_checked(check: Any, text: str, status: int, says: str) -> None:
    found, outcome, said = check(text=text)
    assert (found, outcome) == (status, None)
    assert says in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Neither the process of the script, nor a folder on its paths, nor a temporary one."""
    disk, temporary, begun = (tmp_path / name for name in ("disk", "tmp", "begun"))
    for folder in (disk, temporary):
        folder.mkdir()
    os.mkfifo(begun)
    ends_late = "import os, time\nprint(os.getpid(), file=open('begun', 'w'))\ntime.sleep(60)\n"
    (tmp_path / "train.py").write_text(SCRIPT + ends_late)
    command = [sys.executable, "-c", f"import sys; from {main.__module__} import main; sys.exit(main(sys.argv[1:]))"]
    process = subprocess.Popen(
        [*command, "check-run", "--steps", "99", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    script = int(begun.read_text())  # once it has been opened there
    assert [*disk.iterdir()]
    assert [*temporary.glob("offload-*")]
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not [*disk.iterdir(), *temporary.glob("offload-*")]
    with pytest.raises(ProcessLookupError):
        os.kill(script, 0)


def test_bad_input(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["check-run", "nothing.py"]) == 2
    assert check(name="a.json", text='{"pats": []}')[0] == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check()[0] == 2
