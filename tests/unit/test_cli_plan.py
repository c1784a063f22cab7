"""`offload plan` as people call it: figures that can be worked out by hand, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from offload import cli
from offload.cli.advise import advice
from offload.cli.machine import Machine
from offload.cli.progress import Progress
from offload.cli.scenario import Scenario, ask, least_memory_use, reserved_bytes
from offload.cli.shapes import MODELS, Model
from offload.config import parse_bytes
from offload.errors import InfeasiblePlanError
from offload.measure.rates_file import MACHINES
from offload.plan import GpuRates, NodeRates, PathRates, Rates
from offload.units import format_bytes

GB, GIB = 10**9, 1 << 30
RATES = {
    "cpu_bytes_per_s": {"8": 40 * GB, "16": 60 * GB},
    "memory_bytes_per_s": 300 * GB,
    "compute_flops_per_s": 300e12,
    "paths": [{"read_bytes_per_s": 6 * GB, "write_bytes_per_s": 4 * GB, "latency_s": 1e-6}],
    "gpu": {"update_bytes_per_s": 1000 * GB, "h2d_bytes_per_s": 50 * GB, "d2h_bytes_per_s": 50 * GB},
}


@pytest.fixture
def rates(tmp_path: Path) -> str:
    file = tmp_path / "node.json"
    file.write_text(json.dumps({"format": 1, "rates": RATES}))
    return str(file)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return json.loads(printed.out)


def test_state_on_one_path_takes_what_its_writes_take(rates, capsys):
    found = plan_json(capsys, "--params", "8e9", "--rates", rates, "--gpus", "0", "--placement", "cpu")
    moved = found["rank"]["streamed_bytes"] - found["rank"]["staging_bytes"]
    assert found["rank"]["streamed_bytes"] == pytest.approx(96 * GB, rel=0.001)
    for lane in ("read:0", "write:0"):
        assert found["lanes"][lane]["bytes"] == pytest.approx(moved, rel=1e-3)
    assert found["bound_by"] == "write:0"
    assert found["step_s"] == pytest.approx(moved / (4 * GB), rel=0.02)
    assert found["step_s"] >= found["bound_s"]
    assert found["forward_s"] is None
    assert found["paths"][0]["written_bytes_per_step"] == found["lanes"]["write:0"]["bytes"]
    assert "days" not in found["paths"][0]


def test_each_format_of_state_is_predicted_by_its_rate(rates, capsys, tmp_path):
    """Resident, where a step is its update: by a file of the format before, and by one that knows all formats."""
    known = {"exact": {"8": 30 * GB, "16": 60 * GB}, "compact16": 20 * GB, "compact8": {"16": 5 * GB}}
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({"format": 2, "rates": RATES | {"cpu_bytes_per_s": known}}))
    arguments = ["--params", "8e9", "--gpus", "0", "--placement", "cpu", "--host-memory", "100GiB"]
    each = {"exact": (12.0, 60 * GB), "compact16": (8.0, 20 * GB), "compact8": (5 + 2 / 64, 5 * GB)}
    for name, (nbytes, rate) in each.items():
        found = plan_json(capsys, *arguments, "--rates", str(newer), "--state-format", name)
        assert found["rank"]["state_bytes"] == pytest.approx(nbytes * 8e9, rel=0.001)
        assert found["rank"]["formats"] == {name: {"params": 8e9, "bytes": found["rank"]["state_bytes"]}}
        assert found["step_s"] == pytest.approx(nbytes * 8e9 / rate, rel=0.01)
        assert found["closed_form_step_s"] == pytest.approx(found["step_s"], rel=0.01)
        assert not found["warnings"]
        old = plan_json(capsys, *arguments, "--rates", rates, "--state-format", name)
        assert old["step_s"] == pytest.approx(12 * 8e9 / (60 * GB), rel=0.01)
        assert [name in warning for warning in old["warnings"]] == [True] * (name != "exact")
    assert cli.main(["plan", *arguments, "--rates", rates, "--state-format", "compact8"]) == 0
    assert "there are no rates of the update of compact8 state" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_share_the_node_and_the_model(rates, capsys):
    one = plan_json(capsys, "--params", "8e9", "--rates", rates, "--placement", "cpu")
    four = plan_json(capsys, "--params", "8e9", "--rates", rates, "--placement", "cpu", "--ranks", "4")
    assert four["rank"]["state_bytes"] == pytest.approx(one["rank"]["state_bytes"] / 4, rel=0.001)
    # What the staging slots of three more ranks hold need not move.
    kept = 3 * four["rank"]["staging_bytes"]
    written = [found["paths"][0]["written_bytes_per_step"] for found in (one, four)]
    assert written[0] - written[1] == pytest.approx(kept, rel=0.02)
    assert four["step_s"] == pytest.approx(one["step_s"] * written[1] / written[0], rel=0.05)


def test_nodes_share_the_model_and_some_paths(rates, capsys):
    arguments = ["--rates", rates, "--ranks", "2", "--gpus", "0"]
    one = plan_json(capsys, *arguments, "--params", "1e9")
    same = {**plan_json(capsys, *arguments, "--params", "3e9", "--nodes", "3"), "params": one["params"], "nodes": 1}
    assert same == one  # a node each has its own paths
    rate = 4 * GB  # each way: both directions are through when writes are
    roomy = plan_json(capsys, *arguments, "--params", "3e9", "--nodes", "3", "--shared-path", f"0={3 * rate}")
    assert roomy["step_s"] == one["step_s"]
    total = plan_json(capsys, *arguments, "--params", "3e9", "--nodes", "3", "--shared-path", "0")
    third = plan_json(capsys, *arguments, "--params", "3e9", "--nodes", "3", "--shared-path", f"0={rate}")
    assert third["step_s"] == total["step_s"] == pytest.approx(3 * one["step_s"], rel=0.05)
    assert cli.main(["plan", *arguments, "--params", "3e9", "--nodes", "3"]) == 0
    assert "3,000,000,000 parameters on 2 ranks on each of 3 nodes; each rank has:" in capsys.readouterr().out


def test_links_of_all_ranks_share_the_memory():
    rates = Rates(60e9, (PathRates(6e9, 4e9),), GpuRates(1e12, 30e9, 20e9), 300e9)
    assert rates.shared_by(1).gpu == rates.gpu
    shared = rates.shared_by(8).gpu
    assert shared is not None
    assert shared.h2d_bytes_per_s + shared.d2h_bytes_per_s == pytest.approx(300e9 / 8)
    assert shared.h2d_bytes_per_s == pytest.approx(1.5 * shared.d2h_bytes_per_s)


def test_forward_and_backward_follow_from_tokens_and_flops(rates, capsys):
    arguments = ["--params", "1e9", "--rates", rates, "--host-memory", "12GiB", "--tokens", "30000"]
    found = plan_json(capsys, *arguments)
    assert found["forward_s"] == pytest.approx(2 * 1e9 * 30000 / 300e12)
    assert found["backward_s"] == pytest.approx(2 * found["forward_s"])
    assert found["iteration_s"] == pytest.approx(found["forward_s"] + found["backward_s"] + found["step_s"])
    again = plan_json(capsys, *arguments, "--recompute", "--flops", "150e12")
    assert again["backward_s"] == pytest.approx(3 * again["forward_s"])
    assert again["forward_s"] == pytest.approx(2 * found["forward_s"])
    # With few tokens the gradients' way out of the GPU takes longer than the backward pass.
    few = plan_json(capsys, *arguments[:-1], "100", "--placement", "cpu", "--no-keep-grads")
    assert few["backward_s"] == pytest.approx(2 * 1e9 / (50 * GB), rel=0.01)


@pytest.mark.parametrize("more", [("--ranks", "2"), (), ("--no-keep-grads",)], ids=" ".join)
def test_iterations_with_a_step_that_is_hidden_on_a_gpu(rates, capsys, more):
    """Forward and backward by themselves at least, and less than with the whole step behind them."""
    arguments = ["--params", "4e9", "--rates", rates, "--weights-on", "gpu", "--placement", "cpu", "--flops", "1e14"]
    found = plan_json(capsys, *arguments, "--host-memory", "0", "--tokens", "20000", *more)
    computes_s = found["forward_s"] + found["backward_s"]
    assert found["hidden_iteration_s"].keys() == {"forward", "backward", "both"}
    for seconds in found["hidden_iteration_s"].values():
        assert computes_s <= seconds < found["iteration_s"]


def test_what_a_step_hidden_in_backward_takes(rates, capsys):
    arguments = ["--params", "1e9", "--rates", rates, "--gpus", "0", "--flops", "1e12", "--tokens", "3000"]
    found = plan_json(capsys, *arguments, "--ranks", "2")
    streamed_bytes = found["rank"]["streamed_bytes"]
    assert (
        found["speculation"]["memory_bytes"] == streamed_bytes // 6 > 0
    )  # bf16 weights, 12 bytes of state a parameter
    assert streamed_bytes < found["speculation"]["storage_bytes"] < 1.01 * streamed_bytes
    assert found["hidden_iteration_s"].keys() == {"forward", "backward", "both"}
    assert cli.main(["plan", *arguments]) == 0
    assert "hidden in backward, a step takes 1.9 GiB more of a rank's memory" in capsys.readouterr().out


def test_days_until_a_drive_is_worn_out(rates, capsys):
    arguments = ["--params", "1e9", "--rates", rates, "--endurance", "1PB", "--steps-per-day", "1000"]
    (path,) = plan_json(capsys, *arguments)["paths"]
    assert path["days"] == pytest.approx(1e15 / (1000 * path["written_bytes_per_step"]))


def test_a_step_that_is_not_simulated_wears_as_much(rates, capsys, monkeypatch):
    arguments = ["--params", "8e9", "--rates", rates, "--placement", "cpu", "--endurance", "1PB"]
    (simulated,) = plan_json(capsys, *arguments)["paths"]
    monkeypatch.setattr("offload.cli.scenario.MOST_TILES", 0)
    found = plan_json(capsys, *arguments)
    assert any("not simulated" in warning for warning in found["warnings"])
    (path,) = found["paths"]
    assert path["written_bytes_per_step"] == pytest.approx(simulated["written_bytes_per_step"], rel=1e-3)
    assert path["days"] > 0


def test_the_gpu_takes_its_part(rates, capsys):
    arguments = ["--params", "2e9", "--rates", rates, "--host-memory", "24GiB"]
    both = plan_json(capsys, *arguments)
    cpu = plan_json(capsys, *arguments, "--placement", "cpu")
    half = plan_json(capsys, *arguments, "--placement", "stride:2")
    home = plan_json(capsys, *arguments, "--gpu-memory", "24GiB")
    assert both["step_s"] < 0.8 * cpu["step_s"]
    assert both["step_s"] <= 1.001 * half["step_s"]
    assert half["rank"]["gpu_update_share"] == pytest.approx(0.5, abs=0.01)
    assert home["rank"]["gpu_bytes"] == home["rank"]["state_bytes"]
    assert home["step_s"] == pytest.approx(home["rank"]["state_bytes"] / (1000 * GB))


@pytest.mark.slow
def test_advice_is_what_planning_again_says():
    rates = Rates(40e9, (PathRates(6e9, 4e9),), GpuRates(1e12, 50e9, 50e9), 300e9)
    model = Model(params=8 * GB, weights_on="gpu")
    answer = ask(Scenario.of(model, Machine(rates=rates)))
    found = dict(advice(answer))
    two = ask(Scenario.of(model, Machine(rates=Rates(40e9, rates.paths * 2, rates.gpu, 300e9))))
    assert found["a second path like this one"] == pytest.approx(answer.step_s - two.step_s, rel=0.05)
    assert all(saved_s > 0 for saved_s in found.values())
    # Nothing that is not the bottleneck is recommended.
    assert "a link to the GPU twice as fast" not in found
    assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.slow
def test_hidden_steps_that_paths_bind_take_what_the_paths_take() -> None:
    """Of a rank with some state at home in memory: what is left of its step goes over no path."""
    machine = Machine(rates=Rates(20e9, (PathRates(1e9, 1e9),), GpuRates(1e12, 50e9, 50e9), 50e9, 200e12))
    model = Model(params=1_600_000_000, weights_on="gpu", tokens=4096)
    answer = ask(Scenario.of(model, machine, host_memory=6 * GIB))
    streamed_bytes = sum(s.state_bytes for s in answer.plan.with_updates_in_backward(2).updated_in_backward)
    floor_s = streamed_bytes / 1e9
    assert floor_s > 5 * (answer.forward_s + answer.backward_s)
    for hidden_in in ("backward", "both"):
        assert floor_s <= answer.overlapped_s[hidden_in] <= 1.1 * floor_s


def test_paths_are_called_what_the_rates_call_them(tmp_path, capsys):
    file, path = tmp_path / "named.json", {"read_bytes_per_s": 4e9, "write_bytes_per_s": 4e9}
    known = {"format": 1, "rates": RATES | {"paths": [path, path]}, "paths": [{"path": "/mnt/a"}, {"path": "/mnt/b"}]}
    file.write_text(json.dumps(known))
    arguments = ["--params", "1e9", "--rates", str(file), "--gpus", "0", "--placement", "cpu"]
    found = plan_json(capsys, *arguments)
    assert [row["name"] for row in found["paths"]] == ["path 0 (/mnt/a)", "path 1 (/mnt/b)"]
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "path 0 (/mnt/a) is written" in printed
    assert "path 1 (/mnt/b) is written" in printed
    assert cli.main(["plan", *arguments, "--path-bytes", "1GB"]) == 2
    assert "path 1 (/mnt/b): 953.7 MiB" in capsys.readouterr().err


def test_tables_for_people(rates, capsys):
    arguments = ["plan", "--params", "7B", "--rates", rates, "--ranks", "2", "--tokens", "4096", "--endurance", "7PB"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    for words in (
        *("7,000,000,000 parameters on 2 ranks", "forward ", "write:0 alone needs", "what would help"),
        *("a second path like this one: -", "days until its endurance is used up"),
    ):
        assert words in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
        {"model_type": "gpt2", "vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
         "bos_token_id": 1, "eos_token_id": 2},
    ],
)  # fmt: skip
def test_the_size_of_a_hugging_face_model(rates, capsys, tmp_path, config):
    import transformers

    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    expected = sum(parameter.numel() for parameter in model.parameters())
    for given in (file, tmp_path):
        assert plan_json(capsys, "--config", str(given), "--rates", rates)["params"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "0"], "--params"),
        (["--params", "1e9", "--ranks", "0"], "--ranks"),
        (["--params", "1e9", "--nodes", "0"], "--nodes"),
        (["--params", "1e9", "--shared-path", "1"], "the rates know 1 paths, from 0"),
        (["--params", "1e9", "--shared-path", "drive=1GB"], "--shared-path"),
        (["--params", "1e9", "--shared-path", "0=0"], "more than 0 bytes"),
        (["--params", "1e9", "--shared-path", "0", "--shared-path", "0=1GB"], "each path once"),
        (["--params", "1e9", "--host-memory", "20"], 'give it a unit, such as "20GiB"'),
        (["--params", "1e9", "--path-count", "2"], "the rates know 1 paths"),
        (["--params", "1e9", "--path-count", "0"], "the optimizer state needs 11.2 GiB (12"),
        (["--params", "1e9", "--path-bytes", "1GB"], "path 0: 953.7 MiB (1000000000 bytes)"),
        (["--params", "1e9", "--placement", "fast"], "placement"),
        (["--params", "1e9", "--tokens", "0"], "--tokens"),
        (["--params", "1e9", "--flops", "-1"], "--flops"),
        (["--params", "1e10", "--staging-memory", "4096B"], "raise --staging-memory or lower --subgroup-numel"),
        (["--params", "1e9", "--subgroup-numel", "100"], "--subgroup-numel: '100' cannot be used; give a count"),
        (["--params", "1e9", "--gpu-staging", "4096B", "--placement", "gpu"], "GPU"),
        (["--params", "1e9", "--steps-per-day", "0"], "--steps-per-day"),
        (["--params", "1e9", "--endurance", "forever"], "--endurance"),
        (["--params", "1e9", "--overlap", "forward"], "leave it out: with --tokens a plan shows"),
        (["--config", "missing.json"], "cannot be read"),
        (["--params", "1e9", "--rates", "abacus"], "abacus"),
        (
            ["--params", "8e9", "--host-memory", "node0=100GiB"],
            "'node0' cannot be used; the rates have no memory nodes",
        ),
    ],
)
def test_bad_input_is_one_line(rates, capsys, arguments, message):
    assert cli.main(["plan", "--rates", rates, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


NODE = {"machine": {"memory_bytes": 64 * GIB, "gpu": "2 x A, 1 x B"}}


@pytest.fixture
def node(tmp_path: Path) -> str:
    """A file of rates that says what the node has: 64 GiB, three GPUs of 8 GiB."""
    gpu = RATES["gpu"] | {"memory_bytes": 8 * GIB}
    file = tmp_path / "whole.json"
    file.write_text(json.dumps({"format": 1, "rates": RATES | {"gpu": gpu}, **NODE}))
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        # 4e9 parameters: 44.7 GiB of state, 7.45 GiB of gradients, which three ranks share.
        ("--params 4e9 --ranks 4", ["--ranks", "the node has 3 GPUs", "--gpus"]),
        (
            "--params 16e9 --ranks 3 --host-memory 15GiB --gpus 0 --placement cpu",
            ["the host memory of 3 ranks", "9.9 GiB weights", "(--host-memory)", "the least", "9.9 GiB gradients"],
        ),
        (
            "--params 30e9 --ranks 3 --gpus 0 --placement cpu",
            ["18.6 GiB gradients", "the least a rank takes 19.", "it fits with gradient_memory=0"],
        ),
        ("--params 16e9 --ranks 3", ["a rank's GPU memory (9.9 GiB weights", "the GPU: 8.0 GiB"]),
        ("--params 4e9 --ranks 3 --gpu-memory 6GiB", ["a rank's GPU memory", "6.0 GiB state"]),
        (
            "--params 1e10 --path-count 0 --host-memory 1GiB --gpus 0",
            [
                *("the optimizer state needs", "without a path for state", "the least a rank takes"),
                *("more than the 64.0 GiB", "46.9 GiB state", 'with state_format="compact8"'),  # which may be taken
            ],
        ),
        ("--params 1e9 --path-bytes 1GB --host-memory 0", ["path 0", "the least a rank takes", "GiB state"]),
        ("--params 1e9 --gpus=-1", ["--gpus"]),
        ("--params 1e9 --node-memory much", ["--node-memory"]),
    ],
)
def test_a_node_that_cannot_hold_it(node, capsys, arguments, messages):
    assert cli.main(["plan", "--rates", node, *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert all(message in printed.err for message in messages), printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_what_all_ranks_take_of_their_node(node, capsys):
    arguments = ["--params", "2e9", "--rates", node, "--ranks", "2", "--host-memory", "5GiB", "--placement", "cpu"]
    found = plan_json(capsys, *arguments)
    host, gpu = found["rank"]["host_memory_bytes"], found["rank"]["gpu_memory_bytes"]
    assert gpu["weights"] == 2 * GB
    assert host["gradients"] == pytest.approx(2 * GB, rel=1e-5)  # with padding
    assert host["state"] == pytest.approx(5 * GIB, rel=0.05)
    assert gpu["gradients"] == gpu["state"] == gpu["staging"] == 0
    assert found["node"] == {"memory_bytes": 64 * GIB, "gpus": 3, "used_bytes": 2 * sum(host.values())}
    assert cli.main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "of the node's 64.0 GiB, each " in printed
    assert "GPU: 1.9 GiB of 8.0 GiB, 1.9 GiB weights; activations come on top" in printed
    assert "it would also work, slower, with 3." in printed
    assert "most of it gradients" in printed
    # Weights in host memory count there.
    host = plan_json(capsys, *arguments, "--gpus", "0")["rank"]["host_memory_bytes"]
    assert host["weights"] == 2 * GB


def test_gradients_stay_on_the_gpu_as_the_optimizers_keep_them(node, capsys):
    """By default those of one rank do; several ranks have ZeRO's."""
    arguments = ["--params", "1e9", "--rates", node, "--host-memory", "12GiB", "--tokens", "100", "--placement=cpu"]
    kept, left = (plan_json(capsys, *arguments, flag) for flag in ("--keep-grads", "--no-keep-grads"))
    assert plan_json(capsys, *arguments) == kept
    assert kept["rank"]["gpu_memory_bytes"]["gradients"] == 2 * GB
    assert left["rank"]["gpu_memory_bytes"]["gradients"] == 0
    brought = kept["lanes"]["d2h"]["bytes"] - left["lanes"]["d2h"]["bytes"]
    assert brought == pytest.approx(2 * GB, rel=1e-5)  # with padding
    assert kept["backward_s"] < left["backward_s"]
    assert kept["step_s"] > left["step_s"]
    two = [*arguments, "--ranks", "2"]
    assert plan_json(capsys, *two) == plan_json(capsys, *two, "--no-keep-grads")


def test_another_node_than_that_of_the_rates(node, capsys):
    few = ["--params", "4e9", "--rates", node, "--ranks", "4"]
    assert plan_json(capsys, *few, "--gpus", "4")["node"]["gpus"] == 4
    assert plan_json(capsys, *few, "--gpus", "0")["rank"]["gpu_update_share"] == 0  # none for the fourth
    much = ["--params", "16e9", "--rates", node, "--ranks", "3", "--host-memory", "15GiB", "--gpus", "0"]
    assert plan_json(capsys, *much, "--node-memory", "128GiB")["node"]["memory_bytes"] == 128 * GIB


def test_the_least_budget_is_the_least_that_works(node):
    rates = Rates(40e9, (PathRates(6e9, 4e9),))
    scenario = Scenario.of(Model(params=GB), Machine(rates=rates), 9 * GB, placement="cpu")
    use = least_memory_use(scenario)
    assert use is not None
    state = use.host["state"]
    assert ask(scenario.with_host_memory(state), simulate=False).use == use
    with pytest.raises(InfeasiblePlanError):
        ask(scenario.with_host_memory(int(0.9 * state)), simulate=False)
    all_resident = scenario.with_settings(staging_memory=4096, subgroup_numel=1 << 20)
    assert least_memory_use(all_resident) is not None


def test_advice_gives_no_more_than_the_node_has():
    """Nor what the system, and the process beside its plan, should have."""
    rates = Rates(40e9, (PathRates(6e9, 4e9),), GpuRates(1e12, 50e9, 50e9, memory_bytes=4 * GIB), 300e9)
    scenario = Scenario.of(Model(params=GB, weights_on="gpu"), Machine(rates=rates, memory_bytes=8 * GIB, gpus=1))
    answer = ask(scenario, simulate=False)
    found = dict(advice(answer))
    room = [line for line in found if line.startswith("host budget")]
    assert len(room) == 1
    more = parse_bytes("room", room[0].split("+")[1].removesuffix(" a rank"))
    left = 8 * GIB - answer.use.host_bytes - more
    assert left == pytest.approx(reserved_bytes(8 * GIB, 1), rel=0.02)
    assert not any("GPU budget" in what for what in found)  # 2 of 4 GiB are weights, and 2 are left free
    tight = replace(scenario, machine=replace(scenario.machine, memory_bytes=int(3.3 * GIB)))
    assert all("host budget" not in what for what, _ in advice(ask(tight, simulate=False)))


def test_machines_are_named_in_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    printed = capsys.readouterr().out
    assert "h100-node-nvme-pfs" in printed
    assert "a100-node" in printed
    for file in MACHINES.glob("*.json"):  # what it says of each is what its file says
        found = json.loads(file.read_text())
        paths = " and ".join(path["path"] for path in found.get("paths", ())) or "no paths"
        size = format_bytes(found["machine"]["memory_bytes"])
        assert f"  {file.stem:<20} {found['machine']['gpu']}, {size} of memory, {paths}\n" in printed


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_plan_says_on_a_terminal_how_far_it_is(rates, capsys, monkeypatch, is_terminal):
    """Lines stand for a bar where there is no tqdm; a pipe gets none."""
    clock = iter(range(10**9))
    monkeypatch.setattr("offload.cli.progress.time.monotonic", lambda: float(next(clock)))  # a second a call
    monkeypatch.setattr("offload.cli.progress.sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert cli.main(["plan", "--params", "1e9", "--rates", rates]) == 0
    assert ("plan: visit " in capsys.readouterr().err) is is_terminal


def test_a_log_is_not_filled(capsys, monkeypatch):
    """A run of two minutes has a line every five seconds."""
    clock = iter(range(10**9))
    monkeypatch.setattr("offload.cli.progress.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    shown = Progress(120, title="run", quiet=False, log=True)
    for done in range(120):  # a second each
        shown.show(done, 120, "done")
    assert len(capsys.readouterr().err.splitlines()) == 24


def test_where_a_gpu_is_the_cpu_computes_nothing(node, capsys):
    """Unless it is left out."""
    for gpu in (["--rates", node], ["--gpu", "rtx-4090", "--host", "256GiB"]):
        arguments = ["plan", "--params", "1e9", *gpu, "--tokens", "2048", "--host-memory", "12GiB"]
        assert cli.main([*arguments, "--weights-on", "cpu"]) == 2
        said = capsys.readouterr().err
        for words in ("give host for weights in host memory", "--gpus 0", "--flops"):
            assert words in said
        assert cli.main([*arguments, "--gpus", "0", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["forward_s"] is None  # the FLOP/s are the GPU's
        assert not found["rank"]["gpu_memory_bytes"]
        assert not any("GPU" in each["change"] for each in found["advice"])
        assert cli.main([*arguments, "--gpus", "0", "--flops", "1e12", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["forward_s"] == pytest.approx(2 * 1e9 * 2048 / 1e12)


@pytest.mark.parametrize("words", ["--weights-on gpu", "--gpu-memory 1GiB", "--placement 0.5", "--link 1GB/s"])
def test_no_error_names_a_none_that_nobody_has_written(capsys, words):
    assert cli.main(["plan", "--params", "1e8", "--host", "8GiB", "--drive", "1GB/s:1TB", *words.split()]) == 2
    said = capsys.readouterr().err
    assert "None" not in said
    assert "GPU" in said


def test_a_time_that_rests_on_a_guess_is_marked(rates, capsys):
    arguments = ["plan", "--params", "1e9", "--rates", rates, "--tokens", "4096", "--host-memory", "0", "--gpus", "0"]
    arguments += ["--flops", "1e12"]
    for form in ("exact", "compact8"):
        for more, marked in (((), 2), (("--advise",), 2)):
            assert cli.main([*arguments, "--state-format", form, *more]) == 0
            printed = capsys.readouterr().out
            notes = [line for line in printed.splitlines() if line.startswith("* there are no rates of")]
            times = re.findall(r"\d m?s\*", printed)
            assert (len(notes), len(times) >= marked) == ((1, True) if form == "compact8" else (0, False)), more


def test_gradients_that_leave_make_room_for_state(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--params", "3e9", "--host", "16GiB", "--drive", "3.5GB/s:2TB", "--cores", "8")
    stays = plan_json(capsys, *machine)["rank"]
    leaves = plan_json(capsys, *machine, "--gradient-memory", "0")["rank"]
    assert leaves["host_memory_bytes"]["gradients"] < 0.05 * stays["host_memory_bytes"]["gradients"]
    gained = leaves["host_memory_bytes"]["state"] - stays["host_memory_bytes"]["state"]
    assert gained > 0.9 * stays["host_memory_bytes"]["gradients"]


# Memory nodes

NODES = [
    {"node": 0, "update_bytes_per_s": 60 * GB, "read_bytes_per_s": 200 * GB, "write_bytes_per_s": 150 * GB},
    {"node": 2, "update_bytes_per_s": 20 * GB, "read_bytes_per_s": 60 * GB, "write_bytes_per_s": 30 * GB},
]


@pytest.fixture
def with_nodes(tmp_path: Path) -> list[str]:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"format": 2, "rates": RATES | {"nodes": NODES, "paths": []}}))
    return ["--params", "8e9", "--rates", str(file), "--gpus", "0", "--placement", "cpu"]


def test_homes_are_dealt_to_memory_nodes(with_nodes, capsys):
    arguments = [*with_nodes, "--host-memory", "node2=100GiB,node0=30GiB"]
    found = plan_json(capsys, *arguments)
    first, second = found["rank"]["node_bytes"]["node0"], found["rank"]["node_bytes"]["node2"]
    assert first + second == found["rank"]["host_bytes"] == found["rank"]["state_bytes"]
    assert 29 * GIB < first <= 30 * GIB
    assert found["step_s"] == pytest.approx(first / (60 * GB) + second / (20 * GB), rel=0.01)
    assert found["closed_form_step_s"] == pytest.approx(found["step_s"], rel=0.01)
    assert found["config"]["host_memory"] == {"node0": "30GiB", "node2": "100GiB"}
    assert cli.main(["plan", *arguments]) == 0
    assert "of that on node2, of 100.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ("node0=30GiB,node1=30GiB", "--host-memory: 'node1' cannot be used; the rates have node0, node2"),
        ("node7=30GiB", "'node7' cannot be used; the rates have node0, node2"),
        ("node0=30GiB,node0=1GiB", "give each memory node one size"),
        ("node0=30GiB,100GiB", "give each memory node one size"),
        ("node0=", "--host-memory.node0"),
        ("node0=-1", "--host-memory.node0"),
        ("=1GiB", "name memory nodes as in"),
        ("node0=1GiB,", "give each memory node one size"),
        ("node0=0,node2=0", "the optimizer state"),
    ],
)
def test_memory_nodes_that_make_no_sense_are_refused(with_nodes, capsys, memory, words):
    assert cli.main(["plan", *with_nodes, "--host-memory", memory]) != 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("gigabytes", "advice"), [(600, "paths"), (1, "recompute")])
def test_activations_on_paths_beside_recomputation(gigabytes: int, advice: str, tmp_path, capsys):
    path = {"read_bytes_per_s": gigabytes * GB, "write_bytes_per_s": gigabytes * GB, "latency_s": 1e-6}
    file = tmp_path / "node.json"
    file.write_text(json.dumps({"format": 1, "rates": {**RATES, "paths": [path]}}))
    asked = ("--model", "llama-1b", "--rates", str(file), "--tokens", "4096", "--host-memory", "0")
    answer = plan_json(capsys, *asked)
    found = answer["activations_on_paths"]
    assert found["advice"] == advice
    assert found["recompute_s"] == pytest.approx(answer["forward_s"])
    waits = (found["bytes"] / (gigabytes * GB) - answer[f"{part}_s"] for part in ("forward", "backward"))
    assert found["paths_s"] == pytest.approx(sum(max(0.0, wait) for wait in waits))
    assert cli.main(["plan", *asked]) == 0
    text = capsys.readouterr().out
    assert "on the paths +" in text
    assert ("too slow" in text) == (advice == "recompute")
    assert "both_s" not in plan_json(capsys, *asked, "--recompute")["activations_on_paths"]


def test_memory_nodes_are_filled_the_fastest_first() -> None:
    nodes = (NodeRates(0, 20e9, 30e9, 20e9), NodeRates(2, 60e9, 90e9, 60e9))
    scenario = Scenario.of(
        Model(params=GB), Machine(rates=Rates(60e9, nodes=nodes)), host_memory={"node0": 8 * GIB, "node2": 4 * GIB}
    )
    for nbytes, slow, fast in ((12, 8, 4), (5, 1, 4), (3, 0, 3), (20, 8, 12)):
        other = scenario.with_host_memory(nbytes * GIB)
        assert other.config.node_bytes == {0: slow * GIB, 2: fast * GIB}
        assert other.host_memory == nbytes * GIB


class TestWeightsElsewhere:
    """Weights in host memory, or in a file, computed on the GPU: by hand, from sizes and rates."""

    MACHINE = "--gpu rtx-4090 --link 25GB/s --host 100GB/s:512GiB --drive 4GB/s,2GB/s:2TB --cores 16 --flops 100e12"
    SHAPE = MODELS["llama-8b"]
    WHOLE, REST = 2 * SHAPE.params, 2 * (2 * 128256 * 4096 + 4096)

    def asked(self, capsys, words: str) -> dict:
        return plan_json(capsys, "--model", "llama-8b", *self.MACHINE.split(), *words.split())

    @pytest.mark.parametrize(("tokens", "steps"), [(1024, 1), (8192, 1), (8192, 4)])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_the_link_is_hidden_or_it_is_waited_for(self, capsys, tokens, steps, recompute):
        words = f"--weights-on host --tokens {tokens} --accumulate {steps}" + " --recompute" * recompute
        if tokens == 8192 and steps == 1 and not recompute:
            words = f"plan --model llama-8b {self.MACHINE} --weights-on host --tokens 8192"
            assert cli.main(words.split()) == 2
            most = re.search(r"take tokens in (\d+) micro-steps \(--accumulate \1\)", capsys.readouterr().err)
            assert most
            assert cli.main([*words.split(), "--accumulate", most[1]]) == 0
            assert int(most[1]) == 2 or cli.main([*words.split(), "--accumulate", str(int(most[1]) // 2)]) == 2
            return
        found = self.asked(capsys, words)
        once_s = self.SHAPE.params * tokens / 100e12
        down, again = steps * self.WHOLE, steps * (self.WHOLE - self.REST)
        assert found["weights"]["link_bytes"] == {"forward": down, "backward": again, "gradients": down}
        assert found["forward_s"] == pytest.approx(max(2 * once_s, down / 25e9))
        assert found["backward_s"] == pytest.approx(max((6 if recompute else 4) * once_s, down / 25e9))
        assert found["rank"]["host_memory_bytes"]["weights"] == self.WHOLE
        assert found["rank"]["host_memory_bytes"]["gradients"] == self.WHOLE
        window = 2 * 2 * self.SHAPE.layer_params + self.REST
        assert found["rank"]["gpu_memory_bytes"]["gathered weights"] == window
        assert found["rank"]["gpu_update_share"] == 0

    def test_what_memory_has_no_room_for_is_read(self, capsys):
        room = "--node-memory 56GiB --host-memory 24GiB --state-format compact8 --tokens 4096 --recompute"
        found = self.asked(capsys, f"--weights-on path {room}")
        used, left = found["node"]["used_bytes"], 56 * GIB - reserved_bytes(56 * GIB, 1)
        read = self.WHOLE - (left - used) - found["rank"]["host_memory_bytes"]["weights"]
        drive = found["weights"]["drive_bytes"]
        assert drive == {"forward": read, "backward": read, "step": read + self.WHOLE}
        assert found["forward_s"] >= read / 4e9
        by_host = self.asked(capsys, f"--weights-on host {room}")
        assert found["step_s"] >= read / 4e9 + self.WHOLE / 2e9
        assert found["paths"][0]["written_bytes_per_step"] >= self.WHOLE
        assert by_host["paths"][0]["written_bytes_per_step"] < found["paths"][0]["written_bytes_per_step"]
        assert set(found["hidden_iteration_s"]) == {"forward"}
        said = cli.main(["plan", "--model", "llama-8b", *self.MACHINE.split(), "--weights-on", "path", *room.split()])
        assert said == 0
        assert "of weights are read in forward, and in backward; not hidden" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("gpu", "ranks", "lines"),
        [
            (
                "--gpu rtx-4090 --gpus 2",
                2,
                "CPUOffloadPolicy(pin_memory=False))\n    offload.weights_in_file(model, ",
            ),
            ("", 2, "    fully_shard(module)\n    offload.weights_in_file(model, "),
            ("", 1, "Python:\n    offload.weights_in_file(model, "),
        ],
    )
    def test_advice_for_a_file_is_for_its_ranks(self, capsys, gpu, ranks, lines):
        """`weights_in_host_memory` is for one process alone."""
        machine = f"{gpu} --host 100GB/s:64GiB --drive 4GB/s,2GB/s:2TB --cores 16 --flops 1e13 --ranks {ranks}"
        words = ["--model", "llama-1b", *machine.split(), "--tokens", "1024", "--weights-on", "path", "--advise"]
        assert cli.main(["plan", *words]) == 0
        assert f'{lines}"/mnt/drive0")\n    optimizer = ' in capsys.readouterr().out

    def test_a_file_of_weights_needs_room(self, capsys):
        """State may lie on the other drive, but weights lie on the one that is read fastest."""
        words = ["--model", "llama-8b", *self.MACHINE.split(), "--tokens", "2048", "--weights-on", "path"]
        for size, said in (("10GB", 2), ("20GB", 0)):
            assert cli.main(["plan", *words, "--drive", f"8GB/s,1GB/s:{size}"]) == said
        captured = capsys.readouterr()
        assert "a rank's weights needs 15.0 GiB" in captured.err
        assert "the fastest path: 9.3 GiB (10000000000 bytes); give a larger --drive" in captured.err
        assert "host_memory" not in captured.err.replace("-", "_").partition("larger")[2]
        assert "FLOP/s of each GPU" not in captured.out  # they are given

    @pytest.mark.parametrize("words", ["--placement gpu", "--gpu-memory 1GiB"])
    def test_the_cpu_updates_all(self, capsys, words):
        arguments = ["plan", "--model", "llama-8b", *self.MACHINE.split(), "--weights-on", "host", *words.split()]
        assert cli.main(arguments) == 2
        assert "the weights are not on a GPU" in capsys.readouterr().err

    @pytest.mark.parametrize(("place", "lacks"), [("host", "a GPU that computes them"), ("path", "a path (--drive)")])
    def test_what_is_needed_is_named(self, capsys, place, lacks):
        assert cli.main(["plan", "--params", "1e9", "--host", "64GiB", "--weights-on", place]) == 2
        assert lacks in capsys.readouterr().err

    def test_advice_says_the_line(self, capsys):
        machine = ["--gpu", "rtx-4090", "--link", "25GB/s", "--host", "512GiB", "--cores", "16"]
        arguments = ["--model", "qwen-32b", *machine]
        assert cli.main(["plan", *arguments, "--tokens", "2048", "--advise"]) == 0
        said = capsys.readouterr().out
        assert "    offload.weights_in_host_memory(model)\n" in said
        assert '"offload_param": {"device": "cpu"' in said
        assert "Trainer, run by torchrun --nproc-per-node 1:\n" in said
        assert 'fsdp=True, fsdp_config={"cpu_offload": True}' in said
        assert "use_cpu" not in said
        several = ["--model", "qwen-0.5b", *machine, "--gpus", "2", "--weights-on", "host"]
        assert cli.main(["plan", *several, "--tokens", "2048", "--advise"]) == 0
        said = capsys.readouterr().out
        assert (
            "Trainer, by DeepSpeed, as its FSDP goes with one process" in said
        )  # as its FSDP is refused on several ranks
        assert "fsdp=True" not in said
