"""What `offload plan` chooses by itself, names where a model does not fit, and searches for."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path

import pytest
from pages import Reader

from offload import cli
from offload.cli.advise import Choices
from offload.cli.scenario import Scenario, gpu_room, reserved_bytes
from offload.cli.shapes import MODELS
from offload.config import OffloadConfig, parse_bytes
from offload.errors import InfeasiblePlanError

GIB = 1 << 30
DESKTOP = ["--gpu", "1TB/s:24GiB", "--link", "25GB/s", "--host", "60GB/s:64GiB", "--drive", "3.5GB/s:2TB"]
DESKTOP += ["--cores", "16", "--flops", "60e12"]
LAPTOP = ["--gpu", "1TB/s:13GiB", *DESKTOP[2:4], "--host", "60GB/s:28GiB", *DESKTOP[6:]]
SMALL = ["--gpu", "16GiB", "--link", "25GB/s", "--host", "16GiB", "--drive", "3.5GB/s:2TB", "--flops", "60e12"]

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen-0.5b": 494_032_768,
    "qwen-1.5b": 1_543_714_304,
    "qwen-7b": 7_615_616_512,
    "qwen-14b": 14_770_033_664,
    "qwen-32b": 32_763_876_352,
    "qwen-72b": 72_706_203_648,
}
"""Parameters by the files of weights that their makers publish."""


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.count("\n") == 1
    return printed.err


def test_known_models_have_the_parameters_that_are_published() -> None:
    assert {name: shape.params for name, shape in MODELS.items()} == PUBLISHED


@pytest.mark.slow
def test_a_configuration_has_the_shape_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = MODELS["qwen-0.5b"]
    config = {
        "model_type": "qwen2",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    machine = [*SMALL, "--tokens", "2048"]
    by_file = asked(capsys, "--config", str(tmp_path), *machine)
    assert by_file == asked(capsys, "--model", "qwen-0.5b", *machine)
    assert by_file["rank"]["gpu_memory_bytes"]["activations"] == shape.activation_bytes(2048, recompute=False)


@pytest.mark.slow
def test_idle_memory_is_used_and_the_system_has_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    fits = ["--no-keep-grads", "--recompute", "--tokens", "2048"]
    found = asked(capsys, "--model", "llama-8b", *DESKTOP, *fits)
    used, left = found["node"]["used_bytes"], 64 * GIB - found["node"]["used_bytes"]
    assert left >= reserved_bytes(64 * GIB, 1)
    assert left < reserved_bytes(64 * GIB, 1) + 3 * GIB
    gpu_left = 24 * GIB - sum(found["rank"]["gpu_memory_bytes"].values())
    assert 2.4 * GIB - 1 <= gpu_left < 4 * GIB
    less = asked(capsys, "--model", "llama-8b", *DESKTOP, *fits, "--host-memory", "0")
    assert less["step_s"] > found["step_s"]
    assert less["node"]["used_bytes"] < used


def test_what_leaves_nothing_to_the_system_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--model", "llama-1b", "--host", "16GiB", "--drive", "3GB/s:1TB", "--host-memory", "9GiB")
    assert any("advisable: give less of it to state (--host-memory)" in warning for warning in found["warnings"])


def test_without_paths_state_takes_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a session does; what is given is called by its option where it is refused."""
    found = asked(capsys, "--params", "4e9", "--host", "64GiB")
    assert found["rank"]["host_bytes"] == found["rank"]["state_bytes"] > 44 * GIB
    assert any("advisable: have a drive for state (--drive)" in warning for warning in found["warnings"])
    said = refused(capsys, "--params", "8e9", "--host", "64GiB", "--state-format", "exact")
    assert "the host memory of 1 rank (each 89.4 GiB state" in said
    assert "--host-memory" not in said  # which was not given
    assert said.startswith("offload plan: does not fit: 55.3 GiB more host memory needed; ")
    said = refused(capsys, "--params", "8e9", "--host", "64GiB", "--host-memory", "1GiB")
    assert "--host-memory: 1.0 GiB" in said
    assert "raise --host-memory or give paths" in said
    said = refused(capsys, "--params", "8e9", "--host", "64GiB", "--gradient-memory", "1GiB")
    assert "--gradient-memory: 1073741824 cannot be used" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "switches"),
    [
        (
            "--model llama-3b --tokens 512 --accumulate 1",
            ["keep_grads=False (--no-keep-grads, gradients leave"],
        ),
        ("--model llama-3b --tokens 2048 --no-keep-grads", ["recomputation of activations (--recompute"]),
        ("--model llama-3b --tokens 2048", ["keep_grads=False", "recomputation"]),
        (
            "--model llama-3b --tokens 128 --no-keep-grads --recompute --host-memory 15GiB",
            ["host_memory=", "--host-memory"],
        ),
    ],
)
def test_the_switch_that_makes_a_model_fit_is_named(
    capsys: pytest.CaptureFixture[str], arguments: str, switches: list[str]
) -> None:
    words = ["--gpu", "12GiB", *SMALL[2:]]
    said = refused(capsys, *arguments.split(), *words)
    assert re.match(r"offload plan: does not fit: [\d.]+ [GM]iB more (GPU|host) memory needed; it fits with ", said)
    fits = said.partition("it fits with ")[2].partition("; ")[0]
    assert all(switch in fits for switch in switches), said
    assert ("keep_grads" in fits) == any("keep_grads" in switch for switch in switches)


def test_compact_state_is_named_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and gradients take 2.3 GiB each, exact state 13.8, compact8 of what is no embedding 7.4."""
    said = refused(capsys, "--model", "llama-1b", "--host", "16GiB", "--weights-on", "cpu")
    assert 'it fits with state_format="compact8"' in said


@pytest.mark.slow
def test_what_nothing_makes_fit_is_refused_without_advice(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model", "qwen-32b", "--gpu", "a40", "--host", "512GiB", "--tokens", "512")
    assert "61.0 GiB weights" in said
    assert (
        'it fits with weights in host memory (--weights-on host, docs/weights.md) and state_format="compact' in said
    )
    said = refused(capsys, "--model", "qwen-32b", "--gpu", "a40", "--host", "128GiB", "--tokens", "512")
    assert "it fits" not in said


def test_phases_are_named_where_paths_have_room(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama-1b", "--host", "32GiB", "--drive", "4GB/s:1TB", "--host-memory", "8GiB"]
    assert cli.main(arguments) == 0
    assert "between phases, park() gives back up to" in capsys.readouterr().out
    arguments[arguments.index("4GB/s:1TB")] = "4GB/s:15GB"
    assert cli.main(arguments) == 0
    assert "park()" not in capsys.readouterr().out


def test_as_many_ranks_as_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--model", "llama-8b", "--gpu", "4x40GiB", "--host", "256GiB", "--tokens", "1024")
    assert (found["ranks"], found["node"]["gpus"]) == (4, 4)
    beside = found["rank"]["gpu_memory_bytes"]
    shape = MODELS["llama-8b"]
    assert beside["gathered weights"] == shape.gathered_bytes
    # Of the output layer: its gradient and the copy that is reduced; and the bucket of a layer.
    assert beside["gradients on their way"] == 2 * (2 * shape.vocabulary * shape.hidden + shape.layer_params)


@pytest.mark.parametrize("weights_on", ["gpu", "cpu"])
def test_what_each_stage_divides_among_ranks(capsys: pytest.CaptureFixture[str], weights_on: str) -> None:
    ranks = "--gpu 4x80GiB" if weights_on == "gpu" else "--ranks 4"
    words = ["--model", "llama-8b", "--tokens", "1024", "--host", "256GiB", *ranks.split()]
    shape = MODELS["llama-8b"]
    part = math.ceil(shape.params / 4)
    by_stage = [asked(capsys, *words, "--stage", f"{stage}")["rank"] for stage in (1, 2, 3)]
    assert asked(capsys, *words)["rank"] == by_stage[2]
    assert len({found["state_bytes"] for found in by_stage}) == 1
    memory = [found[f"{'gpu' if weights_on == 'gpu' else 'host'}_memory_bytes"] for found in by_stage]
    assert [found["weights"] for found in memory] == [2 * shape.params, 2 * shape.params, 2 * part]
    whole = "gradients" if weights_on == "gpu" else "gradients of all ranks"
    assert memory[0][whole] == 2 * shape.params
    assert memory[1].get(whole, 0) == memory[2].get(whole, 0) <= 2 * part
    assert [found.get("gathered weights") for found in memory] == [None, None, shape.gathered_bytes]


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (1, "as by ZeRO-1 or DDP with shard=True, and each has all weights and gradients"),
        (2, "as by ZeRO-2, and each has all weights"),
        (3, "as by ZeRO-3 or FSDP2 (--stage)"),
    ],
)
def test_the_lines_of_a_stage_divide_what_its_figures_do(
    capsys: pytest.CaptureFixture[str], stage: int, says: str
) -> None:
    words = ["plan", *RANKS, "--stage", f"{stage}"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert f'"zero_optimization": {{"stage": {stage}, ' in printed
    assert ("stage3_" in printed) == (stage == 3)
    assert ("fully_shard(module)" in printed) == (stage == 3)
    assert ("DistributedDataParallel(model, gradient_as_bucket_view=True)" in printed) == (stage == 1)
    assert ("shard=True))" in printed) == ('"shard": true}' in printed) == (stage == 1)
    assert ("keep_grads=False))" in printed) == ("keep_grads=False" in printed) == (stage == 3)
    assert cli.main([*words, "--for", "torch"]) == 0
    assert ("\nPython: not so: --stage 3 is FSDP2" in capsys.readouterr().out) == (stage == 2)
    words.remove("--advise")
    assert cli.main(words) == 0
    assert says in capsys.readouterr().out


def test_weights_that_no_rank_divides_are_not_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *RANKS, "--stage", "2", "--weights-on", "host")
    assert "--stage: 2 cannot be used; leave it out for --weights-on host" in said
    words = ["--model", "llama-8b", "--gpu", "2x16GiB", "--host", "128GiB", "--tokens", "1024", "--stage", "2"]
    said = refused(capsys, *words, "--advise")
    assert "or divide weights and gradients among ranks, too (--stage 3)" in said


# Searches


def test_sharded_weights_wait_for_no_module(capsys: pytest.CaptureFixture[str]) -> None:
    """A step that goes on in forward is refused where weights are gathered before a module's turn."""
    words = ["--model", "llama-1b", "--gpu", "2x24GiB", "--host", "64GiB", "--drive", "3GB/s:1TB", "--tokens", "2048"]
    words += ["--flops", "60e12", "--host-memory", "2GiB"]
    for setting in asked(capsys, *words, "--advise")["settings"]:
        assert setting["config"].get("overlap", "off") in ("off", "backward")
    assert not any("forward" in each["change"] for each in asked(capsys, *words)["advice"])


@pytest.mark.slow
def test_the_best_settings_fit_and_none_is_beaten(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "--model", "llama-3b", *LAPTOP, "--tokens", "2048", "--advise")["settings"]
    assert len(found) == 3
    assert ["state_format" in setting["config"] for setting in found] == [False, True, True]  # exact comes first
    seconds = [setting["iteration_s"] for setting in found[1:]]
    assert seconds == sorted(seconds)
    for setting in found:
        assert sum(setting["host_memory_bytes"].values()) <= 28 * GIB - reserved_bytes(28 * GIB, 1)
        assert sum(setting["gpu_memory_bytes"].values()) <= gpu_room(13 * GIB)
        used = sum(setting["host_memory_bytes"].values())
        assert setting["host_memory_bytes"]["state"] <= parse_bytes("", setting["config"]["host_memory"]) <= used
        config = OffloadConfig.from_dict(setting["config"])
        assert config.keep_grads == (setting["weights_on"] != "gpu")
        assert [path.path for path in config.path_configs] == ["/mnt/drive0"]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["7GiB", "9GiB"])
def test_no_setting_takes_what_has_to_stay_free(capsys: pytest.CaptureFixture[str], gpu: str) -> None:
    """Whatever lies on the GPU: gradients that stay there, state at home, staging, activations."""
    words = ["--model", "llama-1b", "--gpu", gpu, *SMALL[2:], "--tokens", "1024"]
    for setting in asked(capsys, *words, "--advise")["settings"]:
        assert sum(setting["gpu_memory_bytes"].values()) <= gpu_room(parse_bytes("", gpu))
        config = setting["config"]
        given = [
            f"--{name.replace('_', '-')}={config[name]}"
            for name in ("host_memory", "gpu_memory", "gradient_memory")
            if name in config
        ]
        given += ["--weights-on", setting["weights_on"]]
        given += ["--no-keep-grads"] if config.get("keep_grads") is False else []
        given += [f"--placement={config.get('placement', 'auto')}", *["--recompute"] * setting["recompute"]]
        again = asked(capsys, *words, *given, f"--state-format={config.get('state_format', 'exact')}")
        assert again["step_s"] == pytest.approx(setting["step_s"], rel=0.05)  # what is pasted is what was planned
        assert not any("left free" in warning for warning in again["warnings"])


def test_a_plan_that_leaves_too_little_of_a_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-1b", *SMALL, "--tokens", "512", "--host-memory", "1GiB", "--placement", "cpu"]
    assert not any("left free" in each for each in asked(capsys, *words)["warnings"])
    (warning,) = [each for each in asked(capsys, *words, "--gpu-memory", "9GiB")["warnings"] if "left free" in each]
    assert "2.0 GiB are advisable" in warning
    said = refused(capsys, *words, "--gpu-memory", "9GiB", "--state-format", "exact", "--advise")
    assert "the GPU, less what has to stay free: 14.0 GiB" in said


@pytest.mark.parametrize("more", [["--advise"], ["--target", "10s"], []], ids=" ".join)
def test_what_is_missing_at_the_leanest_is_named(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    """14 billion parameters: 27.5 GiB of weights and as much of gradients, which need not stay."""
    words = ["--model", "qwen-14b", *DESKTOP, "--tokens", "2048"]
    said = refused(capsys, *words, *more, *["--weights-on", "gpu"] * bool(more))
    if more:
        leanest = "with the settings that lack least (state exact, keep_grads=False, placement cpu, recomputation)"
        assert re.search(rf"does not fit: [\d.]+ GiB more GPU memory needed {re.escape(leanest)}; ", said)
        assert "27.5 GiB gradients" not in said
    else:
        assert "it fits with weights in host memory (--weights-on host, docs/weights.md) and" in said
    assert "27.5 GiB weights" in said
    assert "or have weights in host memory (--weights-on host, docs/weights.md)" in said


@pytest.mark.slow
@pytest.mark.parametrize(("size", "more"), [("50GB", ["--advise"]), ("70GB", [])], ids=["advise", "plan"])
def test_drives_that_would_do_are_named(capsys: pytest.CaptureFixture[str], size: str, more: list[str]) -> None:
    """Host memory would do with weights in a file, for which these drives are too small."""
    words = ["--model", "llama-8b", "--gpu", "rtx-4090", "--host", "16GB", "--tokens", "2048"]
    said = refused(capsys, *words, "--drive", f"7GB/s,5GB/s:{size}", *more)
    found = re.search(r", or drives of (\d+)GiB in all with these \(state compact8 .* weights in a file\); ", said)
    assert found
    asked(capsys, *words, "--drive", f"7GB/s,5GB/s:{found[1]}GiB", "--advise")
    refused(capsys, *words, "--drive", f"7GB/s,5GB/s:{0.95 * int(found[1])}GiB", "--advise")


@pytest.mark.parametrize("unfixed", ["state exact", "state compact8"])
def test_the_variant_without_budgets_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unfixed: str
) -> None:
    """Not the one before it, of which there is none at the first."""
    fix_budgets = Choices.fix_budgets

    def fix_most(self: Choices, scenario: Scenario) -> Scenario:
        if str(scenario).startswith(unfixed):
            raise InfeasiblePlanError("one staging slot", 2, {"staging_memory": 1}, "raise staging_memory")
        return fix_budgets(self, scenario)

    monkeypatch.setattr(Choices, "fix_budgets", fix_most)
    words = ["--params", "70e9", "--host", "16GiB", "--drive", "3.5GB/s:2TB", "--weights-on", "cpu", "--advise"]
    said = refused(capsys, *words)
    assert f"more memory for staging slots needed with the settings that lack least ({unfixed}" in said


@pytest.mark.slow
def test_the_least_is_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen-14b", "--host", "30GiB", "--drive", "3.5GB/s:2TB", "--tokens", "2048"]
    least = refused(capsys, *words).partition("at the least a rank takes ")[2]
    assert "weights in a file on a drive (--weights-on path, docs/weights.md)" in least
    assert "27.5 GiB" not in least  # of weights, or of gradients
    least = refused(capsys, *words, "--weights-on", "cpu").partition("at the least a rank takes ")[2]
    assert "27.5 GiB weights" in least
    assert "27.5 GiB gradients" not in least
    assert "gradient_memory=0 (--gradient-memory 0, gradients leave for the paths during backward)" in least
    assert "recomputation" in least
    taken = float(least.split()[0])
    node = ["--node-memory", f"{taken + 0.2:.1f}GiB", "--host-memory", "0"]
    asked(capsys, *words, "--gradient-memory", "0", "--recompute", *node)


def test_what_is_printed_for_the_cpu_runs_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "qwen-0.5b", "--host", "16GiB", "--drive", "3GB/s:1TB", "--tokens", "256", "--advise"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "use_cpu=True" in printed
    assert "keep_grads" not in printed


@pytest.mark.slow
def test_the_cheapest_setting_meets_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-3b", *LAPTOP, "--tokens", "2048"]
    (slow,) = asked(capsys, *arguments, "--target", "1min")["settings"]
    (fast,) = asked(capsys, *arguments, "--target", "15s")["settings"]
    assert slow["iteration_s"] <= 60
    assert fast["iteration_s"] <= 15
    taken = [sum(setting["host_memory_bytes"].values()) for setting in (slow, fast)]
    assert taken[0] < taken[1]  # a longer step needs less memory
    assert "state_format" not in slow["config"]
    arguments += ["--state-format", "exact", "--weights-on", "gpu"]
    told = [refused(capsys, *arguments, "--target", target) for target in ("100ms", "3s")]
    shortest = [re.search(r" or less: the shortest iteration is (.*?) \(.* bound by ", said) for said in told]
    assert shortest[0]
    assert shortest[1]
    assert shortest[0][1] == shortest[1][1]


@pytest.mark.slow
def test_host_memory_is_left_for_steps_in_backward_where_that_pays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen-7b", *DESKTOP, "--tokens", "16384", "--accumulate", "8", "--state-format", "exact"]
    words += ["--weights-on", "gpu", "--advise"]
    (best, *_) = asked(capsys, *words)["settings"]
    assert best["config"]["overlap"] == "both"
    (full, *_) = asked(capsys, *words, "--host-memory", "42GiB")["settings"]
    assert full["config"]["overlap"] == "forward"
    assert best["iteration_s"] < 0.9 * full["iteration_s"]
    assert cli.main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "overlap backward, both: as long as few steps clip gradients" in printed
    clipped = asked(capsys, *words, "--clip")
    assert {setting["config"]["overlap"] for setting in clipped["settings"]} <= {"off", "forward"}
    assert "# clip with optimizer.clip_grad_norm_: torch's own finds no gradients any more" in printed


def test_drives_without_room_for_a_checkpoint_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-1b", *SMALL, "--tokens", "512", "--placement", "cpu", "--no-keep-grads", "--recompute"]
    assert not [each for each in asked(capsys, *words)["warnings"] if "drives" in each]
    words += ["--host-memory", "0", "--drive", "3.5GB/s:30GB"]
    words.remove("3.5GB/s:2TB")
    words.remove("--drive")
    (told,) = [each for each in asked(capsys, *words)["warnings"] if "drives" in each]
    assert re.match(r"drives too small for a checkpoint beside the state, which takes up to 3\d\.\d GiB in all", told)
    assert cli.main(["plan", *words, "--advise", "--for", "transformers"]) == 0
    printed = capsys.readouterr().out
    assert "setting 1: drives too small for a checkpoint" in printed
    (first, *_) = re.findall(r"TrainingArguments\(.*", printed)
    assert "save_total_limit" not in first


def test_what_is_given_is_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--state-format", "compact16", "--host-memory", "4GiB", "--no-keep-grads", "--recompute"]
    found = asked(capsys, "--model", "llama-1b", *SMALL, "--tokens", "1024", *given, "--advise")["settings"]
    assert len(found) == 1
    assert found[0]["config"]["state_format"] == "compact16"
    assert found[0]["host_memory_bytes"]["state"] <= parse_bytes("", found[0]["config"]["host_memory"]) <= 4 * GIB


@pytest.mark.slow
def test_what_is_pasted_is_what_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-1b", *SMALL, "--tokens", "2048", "--advise"]
    config = asked(capsys, *arguments)["settings"][0]["config"]
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    (as_json, *_) = re.findall(r"^    (\{.*\})$", printed, re.MULTILINE)
    assert json.loads(as_json) == config
    (python, *_) = re.findall(r"offload=(dict\(.*\))\)$", printed, re.MULTILINE)
    call = ast.parse(python, mode="eval").body
    assert isinstance(call, ast.Call)
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == config
    (trainer, *_) = re.findall(r"transformers.enable\((.*)\)$", printed, re.MULTILINE)
    assert ast.literal_eval(trainer) == config
    (deepspeed, *_) = re.findall(r'^    ("multi_tier_offload": .*)$', printed, re.MULTILINE)
    inside = json.loads(f"{{{deepspeed}}}")["multi_tier_offload"]
    (zero, *_) = re.findall(r'^    ("zero_optimization": .*),$', printed, re.MULTILINE)
    layer, largest = MODELS["llama-1b"].layer_params, MODELS["llama-1b"].largest_params
    assert json.loads(f"{{{zero}}}")["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": layer,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer + largest,
        "stage3_max_reuse_distance": layer,
    }
    assert not {"keep_grads"} & set(inside)  # which DeepSpeed's backend refuses
    assert {name: config[name] for name in inside} == inside
    (given, *_) = re.findall(r"^    arguments = (TrainingArguments\(.*\))$", printed, re.MULTILINE)
    made = ast.parse(given, mode="eval").body
    assert isinstance(made, ast.Call)
    names = {keyword.arg for keyword in made.keywords}
    assert {"output_dir", "optim", "save_total_limit", "per_device_train_batch_size"} <= names
    assert "use_cpu" not in names
    lines = printed.splitlines()
    assert lines[0] == "Fits."
    assert "setting" in lines[1]
    rows = [line for line in lines if re.match(r"\d +state ", line)]
    assert len(rows) == 3
    assert all(("(rounded)" in row) == ("state exact" not in row) for row in rows)
    follows = [number for number, line in enumerate(lines) if "optimizer.overlap_forward(model)" in line]
    assert follows
    assert all("# optimizer.finish() before you read weights" in lines[number + 1] for number in follows)
    for words in ("weights of 16 bits", "2,048 tokens", "in place of /mnt/drive0", "Trainer, for weights on a GPU:"):
        assert words in printed
    for setting in (OffloadConfig.from_dict(config), OffloadConfig(**config)):
        assert setting.path_configs[0].path == "/mnt/drive0"


def test_a_step_alone_is_no_iteration(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is known of forward and backward on a card that is memory alone."""
    machine = SMALL[: SMALL.index("--flops")]
    assert cli.main(["plan", "--model", "qwen-0.5b", *machine, "--tokens", "2048", "--advise"]) == 0
    _, head, first, *rest = capsys.readouterr().out.splitlines()
    column = head.index("iteration") + len("iteration") - 1
    assert first[column - 1 : column + 1] == " -"
    assert "forward and backward: unknown (the rates know no FLOP/s; give --flops)" in rest


WORDS = "--model qwen-0.5b --gpu 16GiB --host 16GiB --drive 3.5GB/s:2TB --tokens 1024"


@pytest.mark.parametrize(
    ("arguments", "first", "says"),
    [
        (WORDS, "exact", "exact keeps every bit of state, 5.5 GiB; compact"),
        ("--model qwen-0.5b --host 9GiB --weights-on cpu", "compact8", "exact state does not fit here; compact"),
        (f"{WORDS} --state-format compact8", "compact8", "\ncompact8 rounds state (docs/formats.md)\n"),
        (f"{WORDS} --state-format exact", "exact", ""),
    ],
)
def test_a_setting_with_exact_state_comes_first_where_one_fits(
    capsys: pytest.CaptureFixture[str], arguments: str, first: str, says: str
) -> None:
    assert cli.main(["plan", *arguments.split(), "--advise"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^1 +state {first}", printed, re.MULTILINE)
    assert says in printed
    assert ("docs/formats.md" in printed) == bool(says)
    assert "offload probe" not in printed  # of a machine in words


HEADS = {
    "torch": "Python, for weights on a GPU:",
    "json": "JSON, after model.",
    "deepspeed": "DeepSpeed, in its config, for weights on a GPU, after model.",
    "transformers": "Trainer, for weights on a GPU:",
}


@pytest.mark.parametrize("framework", HEADS)
def test_lines_for_one_framework(capsys: pytest.CaptureFixture[str], framework: str) -> None:
    words = [*WORDS.split(), "--state-format", "exact", "--recompute", "--keep-grads", "--weights-on", "gpu"]
    assert cli.main(["plan", *words, "--advise", "--for", framework]) == 0
    printed = capsys.readouterr().out
    for name, head in HEADS.items():
        assert (f"\n{head}" in printed) == (name == framework)
    if framework in ("json", "deepspeed"):
        assert re.search(r"after model\.\w+_enable\(\) in the script:$", printed, re.MULTILINE)


def test_what_a_framework_cannot_have_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS.split(), "--state-format", "exact", "--weights-on", "path", "--advise", "--for", "transformers"]
    assert cli.main(["plan", *words]) == 0
    assert "\nTrainer: not with weights in a file (docs/weights.md)\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["plan", *WORDS.split(), "--for", "deepspeed"])
    assert "--advise or --target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "optimizer", "trainer", "deepspeed"),
    [
        ("lion", "offload.Lion(", 'optim="offload_lion"', '"optimizer": {"type": "Lion"'),
        ("adagrad", "offload.Adagrad(", 'optim="offload_adagrad"', None),
        ("sgd", "momentum=0.9, offload=", 'optim="offload_sgd", optim_args="momentum=0.9"', None),
    ],
)
def test_lines_have_the_optimizer_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], rule: str, optimizer: str, trainer: str, deepspeed: str | None
) -> None:
    words = [*WORDS.split(), "--state-format", "exact", "--rule", rule, "--advise"]
    assert cli.main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    for line in (optimizer, trainer, deepspeed or "Trainer"):
        assert line in printed
    assert "adamw" not in printed.lower()
    assert ("zero_optimization" in printed) == (deepspeed is not None)
    if deepspeed is None:
        assert cli.main(["plan", *words, "--for", "deepspeed"]) == 0
        assert f": not with --rule {rule}\n" in capsys.readouterr().out


RANKS = [*WORDS.replace("16GiB", "2x16GiB", 1).split(), "--state-format", "exact", "--advise"]


def test_the_trainer_of_several_ranks_shards_by_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its DDP would have all weights and all state on each rank, where the figures are of a part of each."""
    assert cli.main(["plan", *RANKS, "--for", "transformers"]) == 0
    printed = capsys.readouterr().out
    head = r"^Trainer.*, by DeepSpeed, as its FSDP goes with one process alone, run by torchrun --nproc-per-node 2:$"
    assert re.search(head, printed, re.MULTILINE)
    (written, *_) = re.findall(r"^    config = (.*)$", printed, re.MULTILINE)
    config = ast.literal_eval(written)
    assert config["zero_optimization"]["stage"] == 3
    assert OffloadConfig.from_dict(config["multi_tier_offload"]).keep_grads
    (arguments, *_) = re.findall(r"TrainingArguments\((.*)\)$", printed, re.MULTILINE)
    assert "deepspeed=config, bf16=True" in arguments
    for words in ("offload_adamw", "save_total_limit", "fsdp=", "offload_transformers", "Python"):
        assert words not in printed
    assert cli.main(["plan", *RANKS, "--for", "deepspeed"]) == 0
    head = r"^DeepSpeed, in its config.*, run by torchrun --nproc-per-node 2 -m offload.integrations.deepspeed:$"
    assert re.search(head, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("more", "says", "says_not"),
    [
        ("", ["import fully_shard", "model.layers, model): fully_shard(module)", "--num_processes 2 --use_fsdp"], []),
        (
            "--model llama-2-7b --gpu 2x40GiB --host 128GiB",
            ["layers, model.model.embed_tokens, model.lm_head, model): fully_shard(module) #", "keep_grads=False"],
            [],
        ),
        (
            "--weights-on host",
            ["fully_shard(module, offload_policy=CPUOffloadPolicy())", "--fsdp_offload_params true"],
            ["weights_in_host_memory", "keep_grads"],
        ),
        (
            "--weights-on path",
            ["CPUOffloadPolicy(pin_memory=False)) offload.weights_in_file(model"],
            ["weights_in_host_memory", "accelerate"],
        ),
    ],
    ids=["tied", "untied", "host", "path"],
)
def test_the_loop_of_several_ranks_shards_by_fsdp2(
    capsys: pytest.CaptureFixture[str], more: str, says: list[str], says_not: list[str]
) -> None:
    words = RANKS if "--model" not in more else RANKS[6:]
    assert cli.main(["plan", *words, *more.split(), "--for", "torch"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in says:
        assert text in printed
    for text in says_not:
        assert text not in printed


def test_weights_in_a_file_are_a_setting_of_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS.split(), "--state-format", "exact", "--weights-on", "path", "--advise", "--for", "deepspeed"]
    assert cli.main(["plan", *words]) == 0
    (zero,) = re.findall(r'^    ("zero_optimization": .*),$', capsys.readouterr().out, re.MULTILINE)
    param = {"device": "nvme", "nvme_path": "/mnt/drive0"}
    assert json.loads(f"{{{zero}}}")["zero_optimization"]["offload_param"] == param


def test_what_a_framework_cannot_have_is_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and gradients of 3 billion parameters, 6 GiB each, fit this host in a file alone."""
    words = ["--model", "llama-3b", "--gpu", "7GiB", "--host", "8GiB", "--drive", "3.5GB/s:1TB", "--tokens", "128"]
    words += ["--state-format", "exact", "--advise", "--for"]
    assert cli.main(["plan", *words, "deepspeed"]) == 0
    assert '"offload_param": {"device": "nvme"' in capsys.readouterr().out
    assert "with the settings for transformers that lack least (" in refused(capsys, *words, "transformers")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"{WORDS} --host-memory 1GiB", "Fits.\n"),
        ("--params 1e8 --host 16GiB --drive 1GB/s:1TB", "Fits, without activations, whose size is not known"),
        ("--params 1e8 --gpu 16GiB --host 16GiB --drive 1GB/s:1TB --tokens 8", "Fits, without activations"),
    ],
)
def test_the_first_line_says_whether_it_fits(capsys: pytest.CaptureFixture[str], arguments: str, says: str) -> None:
    assert cli.main(["plan", *arguments.split()]) == 0
    assert capsys.readouterr().out.startswith(says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--params 8e9 --host 64GiB --state-format exact", "55.3 GiB more host memory needed"),
        ("--params 8e9 --host 64GiB --host-memory 1GiB", "88.4 GiB more memory for state needed"),
        ("--model llama-8b --host 64GiB --drive 3GB/s:50GB --host-memory 0", "more room on the drives needed"),
        ("--model llama-8b --gpu 12GiB --host 64GiB --drive 3GB/s:2TB --tokens 128", "more GPU memory needed"),
        ("--model llama-8b --host 64GiB --drive 3GB/s:2TB --staging-memory 1MiB", "memory for staging slots needed"),
    ],
)
def test_what_is_lacking_comes_first(capsys: pytest.CaptureFixture[str], arguments: str, says: str) -> None:
    """And no option is advised that describes a machine by a file."""
    said = refused(capsys, *arguments.split())
    assert re.match(r"offload plan: does not fit: [\d.]+ [KMGT]iB more ", said)
    assert says in said.partition(";")[0]
    for option in ("--node-memory", "--ranks", "--rates"):
        assert option not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drive", "2TB:3.5GB/s"], 'SPEED:SIZE: "3.5GB/s:2TB"'),
        (["--host", "64GiB:80GB/s"], 'SPEED:SIZE: "80GB/s:64GiB"'),
        (["--target", "soon"], "such as 10s, 500ms or 2min"),
        (["--target", "0s"], "--target"),
        (["--target", "1e999s"], "--target"),
        (["--accumulate", "0"], "--accumulate"),
        (["--picture", "plan.txt"], "ends in .png, .svg or .html"),
        (["--picture", "plan.png", "--advise"], "leave --advise out"),
        (["--picture", "/nowhere/plan.png"], "--picture"),
        (["--model", "gpt-5"], "name one of llama-2-7b"),
        (["--model", "Qwen/Qwen2.5-7B"], "did you mean qwen-7b?"),
        (["--model", "meta-llama/Llama-3.1-8B-Instruct"], "did you mean llama-8b?"),
        (["--model", "meta-llama/Llama-2-7b-hf"], "did you mean llama-2-7b?"),
        (["--model", "llama-7b"], "did you mean llama-2-7b?"),
        (["--model", "llama-13b"], "did you mean llama-2-13b?"),
        (["--model", "Llama2-65b"], "did you mean llama-70b?"),
        (["--model", "qwen2.5-0.5b"], "did you mean qwen-0.5b?"),
        (["--model", "lama-8b"], "did you mean llama-8b?"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    model = [] if "--model" in arguments else ["--model", "qwen-0.5b"]
    assert cli.main(["plan", *model, *SMALL, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_searches_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", "qwen-0.5b", *SMALL, "--advise", "--target", "3s"])
    assert "give --target or --advise, not both: each prints lines to paste" in capsys.readouterr().err
    assert cli.main(["plan", "--model", "qwen-0.5b", *SMALL, "--target", "3s", "--for", "torch"]) == 0
    assert "optimizer = offload.AdamW(" in capsys.readouterr().out


# Pictures


def test_a_plan_has_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ending, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!DOCTYPE html>")):
        file = tmp_path / f"plan.{ending}"
        asked(capsys, "--model", "qwen-0.5b", *SMALL, "--host-memory", "2GiB", "--picture", str(file))
        content = file.read_bytes()
        assert content.startswith(begins)
    reader = Reader(content.decode())
    assert not reader.open
    assert reader.tags.count("svg") == 2
    said = " ".join(reader.said)
    for words in ("host memory", "path 0 (/mnt/drive0)", "write path 0", "494,032,768 parameters"):
        assert words in said


def test_names_in_a_page_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of rates may be another's."""
    evil = '<script>alert(1)</script>"&$x$'
    rates = {"cpu_bytes_per_s": 4e10, "paths": [{"read_bytes_per_s": 4e9, "write_bytes_per_s": 4e9}]}
    known = {"format": 2, "rates": rates, "paths": [{"path": evil}], "warnings": [evil], "source": {evil: evil}}
    (tmp_path / "rates.json").write_text(json.dumps(known))
    file = tmp_path / "plan.html"
    asked(capsys, "--params", "1e8", "--rates", str(tmp_path / "rates.json"), "--picture", str(file))
    reader = Reader(file.read_text())
    assert not reader.open
    assert "script" not in reader.tags
    assert evil in " ".join(reader.said)
    assert "http-equiv" in file.read_text()
