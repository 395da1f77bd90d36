"""`{checkpoint}` and `{{...}}` in the command of `ckptguard run`."""

from __future__ import annotations

import pytest

from ckptguard.errors import UsageError
from ckptguard.integrations.arguments import fill

CKPT = "runs/a/checkpoint-20"


@pytest.mark.parametrize(
    ("command", "resumed", "fresh"),
    [
        (["train", "{{--resume", "{checkpoint}}}"], ["train", "--resume", CKPT], ["train"]),
        (["train", "{{", "--resume", "{checkpoint}", "}}", "-v"], ["train", "--resume", CKPT, "-v"], ["train", "-v"]),
        (["train", "{{--resume={checkpoint}}}"], ["train", f"--resume={CKPT}"], ["train"]),
        (["train", "{{--no-warmup}}"], ["train", "--no-warmup"], ["train"]),
        (["sh", "-c", "train {{--resume {checkpoint}}} -v"], ["sh", "-c", f"train --resume {CKPT} -v"], ["sh", "-c", "train  -v"]),
        (["train", "{{-a", "b}}", "{{-c", "{checkpoint}}}"], ["train", "-a", "b", "-c", CKPT], ["train"]),
        (["train", '{"a": {"b": 1}}'], ["train", '{"a": {"b": 1}}'], ["train", '{"a": {"b": 1}}']),
        (["train", "{{", '{"a": {"b": 1}}', "}}"], ["train", '{"a": {"b": 1}}'], ["train"]),
        (["train", "x={{ name }}"], ["train", "x={{ name }}"], ["train", "x={{ name }}"]),
        (["train", "{{}}", "{{", "}}"], ["train", ""], ["train"]),
    ],
)  # fmt: skip
def test_groups(command: list[str], resumed: list[str], fresh: list[str]) -> None:
    assert fill(command, CKPT) == resumed
    assert fill(command, None) == fresh


def test_a_checkpoint_outside_of_every_group_is_refused_on_a_fresh_run() -> None:
    assert fill(["train", "--resume", "{checkpoint}"], CKPT) == ["train", "--resume", CKPT]
    with pytest.raises(UsageError, match=r"this is a fresh run, and the command needs \{checkpoint\}"):
        fill(["train", "--resume", "{checkpoint}"], None)


def test_a_group_that_is_never_closed_is_refused() -> None:
    with pytest.raises(UsageError, match="never closed"):
        fill(["train", "{{--resume", "{checkpoint}"], CKPT)
