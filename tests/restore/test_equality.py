"""State equality both ways, on leaves and on names."""

from __future__ import annotations

import pytest
import torch

from ckptguard.restore.components import (
    canonical,
    component_of_file,
    components_of,
    renames,
    without,
)
from ckptguard.restore.equality import compare
from ckptguard.restore.held import Held
from ckptguard.restore.leaves import Leaf, live_leaves
from ckptguard.restore.streams import find_streams


def kinds(component, saved, live):
    return [(d.kind, d.path) for d in compare(component, live_leaves(saved), live_leaves(live)).differences]


def test_every_way_to_differ_is_told_apart():
    saved = {
        "a": torch.ones(2),
        "b": torch.ones(2),
        "c": torch.ones(2),
        "d": torch.ones(2),
        "gone": torch.ones(1),
    }
    live = {
        "a": torch.ones(2),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(3),
        "d": torch.tensor([1.0, 2.0]),
        "new": torch.ones(1),
    }
    assert kinds("model", saved, live) == [
        ("cast", "b"),
        ("reshaped", "c"),
        ("changed", "d"),
        ("dropped", "gone"),
        ("defaulted", "new"),
    ]


def test_negative_zero_and_nan_are_compared_by_their_bits():
    assert kinds("model", {"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([-0.0, 1.0])}) == [
        ("changed", "a")
    ]
    nan = torch.tensor([float("nan"), 1.0])
    assert kinds("model", {"a": nan}, {"a": nan.clone()}) == []


def test_a_number_may_come_back_as_a_tensor_of_one():
    assert (
        kinds(
            "optimizer", {"lr": 0.1, "step": 3}, {"lr": torch.tensor(0.1, dtype=torch.float64), "step": 3.0}
        )
        == []
    )
    assert kinds("optimizer", {"lr": 0.1}, {"lr": torch.tensor(0.2)}) == [("changed", "lr")]


def test_a_tied_weight_is_saved_once():
    weight = torch.ones(2, 2)
    assert kinds("model", {"embed": weight}, {"embed": weight, "head": weight}) == []
    assert kinds("model", {"embed": weight}, {"embed": weight, "head": weight.clone()}) == [
        ("defaulted", "head")
    ]


def test_settings_of_a_newer_library_are_no_lost_state():
    saved = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    live = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0], "decoupled_weight_decay": True}]}
    assert kinds("optimizer", saved, live) == [("added", "param_groups.0.decoupled_weight_decay")]
    assert kinds("scheduler", {"last_epoch": 3}, {"last_epoch": 3, "_is_initial": False}) == [
        ("added", "_is_initial")
    ]
    assert kinds("scheduler", {"last_epoch": 3}, {"last_epoch": 3, "T_max": 9}) == [("defaulted", "T_max")]


def test_what_cannot_be_compared_is_counted_not_passed():
    found = compare("model", {("a",): Leaf("other")}, {("a",): Leaf("number", value=1)})
    assert (found.compared, found.skipped, found.differences) == (0, 1, ())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_our_reader_and_a_live_tensor_agree_on_every_dtype(tmp_path, dtype):
    state = {
        "w": torch.arange(12).reshape(3, 4).to(dtype),
        "t": torch.arange(12).reshape(3, 4).to(dtype).T,
        "e": torch.empty(0, dtype=dtype),
    }
    torch.save({"model": state}, tmp_path / "c.pt")
    held = Held(str(tmp_path / "c.pt"))
    found = compare("model", held.leaves("model"), live_leaves(state))
    assert (found.differences, found.compared) == ((), 3)


@pytest.mark.parametrize(
    "name, component",
    [
        ("model_state_dict", "model"),
        ("optim_states", "optimizer"),
        ("lr_scheduler", "scheduler"),
        ("GradScaler", "scaler"),
        ("train_loader", "dataloader"),
        ("ema_state_dict", "ema"),
        ("rng_state", "rng"),
        ("step", "step"),
    ],
)
def test_names_that_people_give(name, component):
    assert canonical(name) == component


def test_components_nested_flat_and_listed():
    sd = {"w": torch.ones(1)}
    assert components_of({"state": {"model": sd, "optimizer": sd}, "step": 3})["model"] == ("state", "model")
    assert components_of(sd) == {"model": ()}
    listed = components_of({"state_dict": sd, "optimizer_states": [{"a": 1}, {"a": 2}], "step": 1})
    assert (listed["optimizer"], listed["optimizer_1"]) == (("optimizer_states", 0), ("optimizer_states", 1))


@pytest.mark.parametrize(
    "file, component",
    [
        ("model-00001-of-00002.safetensors", "model"),
        ("pytorch_model.bin", "model"),
        ("optimizer_1.bin", "optimizer_1"),
        ("rng_state_0.pth", "rng"),
        ("random_states_0.pkl", "rng"),
        ("training_args.bin", None),
        ("config.json", None),
    ],
)
def test_files_of_a_directory(file, component):
    assert component_of_file(file) == component


def test_wrappers_rename_weights_and_nothing_else_may():
    assert renames(["module.a"], ["a"]) == {"module.a": "a"}
    assert renames(["a"], ["_orig_mod.a"]) == {"a": "_orig_mod.a"}
    assert renames(["a"], ["a"]) == {} and renames(["a"], ["b"]) is None


def test_generators_are_known_by_the_form_of_their_states():
    import random

    import numpy as np

    state = torch.get_rng_state()
    tree = {
        "rng": {
            "py": random.getstate(),
            "np": np.random.get_state(),
            "cpu": state,
            "cuda": [torch.zeros(16, dtype=torch.uint8)],
        },
        "loader_generator": torch.Generator().manual_seed(1).get_state(),
    }
    found = find_streams(tree)
    assert set(found) == {"python", "numpy", "torch", "cuda"} and found["torch"] is state


def test_what_is_looked_for_elsewhere_leaves_the_parts_out():
    tree = {"model": {"a": 1}, "state": {"optimizer": {"b": 2}, "seeds": 3}, "optims": [{"c": 4}], "step": 5}
    paths = [("model",), ("state", "optimizer"), ("optims", 0)]
    assert without(tree, paths) == {"state": {"seeds": 3}, "optims": {}, "step": 5}
