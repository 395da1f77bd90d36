"""Which start of which job a process belongs to."""

from __future__ import annotations

import pytest

from ckptguard.identity import identify

SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
TORCHRUN = {"WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({}, None),
        ({"HOSTNAME": "laptop"}, None),
        (SRUN, "slurm-77-0-0"),
        ({**SRUN, "SLURM_RESTART_COUNT": "2"}, "slurm-77-2-0"),
        ({**SRUN, "SLURM_STEP_ID": "1"}, "slurm-77-0-1"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, None),  # the batch script: one process, many attempts
        (TORCHRUN, "rendezvous-node1-29500"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "job/7"}, "elastic-job_7"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": "3"}, "elastic-j-r3"),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, None),
        ({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}, "job-train-0"),
        ({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3", "JOBSET_RESTART_ATTEMPT": "2"}, "job-train-2"),
        ({"PMIX_NAMESPACE": "prte-1@1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpi-prte-1_1"),
        ({**SRUN, "CKPTGUARD_DECISION_ID": "mine"}, "mine"),
    ],
)
def test_keys(environment: dict[str, str], key: str | None) -> None:
    found = identify(environment)
    assert (found and found.key) == key


def test_what_the_user_says_comes_first_and_restarts_still_count() -> None:
    found = identify({**SRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, "attempt 5/a")
    assert found is not None
    assert found.key == "attempt_5_a-r1"
