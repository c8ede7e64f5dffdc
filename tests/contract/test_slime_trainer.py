"""Credit in slime's own trainer: its advantages, its whitening, its slices and its logging around our hook."""

import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midstream.hooks.slime.credit import apply_credit
from midstream.local.batch import convert
from tests.hooks.credited import args_of, forked_batch, rollout, sample, zigzag_shares

FLAGS = {
    "advantage_estimator": "grpo",
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "use_rollout_logprobs": False,
    "custom_advantage_function_path": None,
    "kl_coef": 0,
    "use_opd": False,
    "ci_test": False,
    "log_multi_turn": False,
    "log_passrate": False,
    "log_correct_samples": False,
    "wandb_always_use_train_step": False,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "global_batch_size": 8,
}
ESTIMATORS = ["anchored", "lag_decay", "prefix_is"]


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_hook_gives_slimes_trainer_what_it_gives_ours(
    ranks: int, whitened: bool, repository: Path, slime_home: str, tmp_path: Path
):
    args = args_of(tmp_path, *ESTIMATORS, normalize_advantages=whitened)
    data = convert(args, forked_batch())
    # A log-ratio of its own for each token, so that one that is taken for another shows.
    data["log_probs"] = [
        [v + 0.05 * at for at, v in enumerate(values)] for values in data["rollout_log_probs"]
    ]
    found = in_slime(repository, slime_home, tmp_path, {"args": flags_of(args), "data": data, "ranks": ranks})

    ours = {**data, "loss_masks": [torch.tensor(mask) for mask in data["loss_masks"]]}
    ours["advantages"] = [
        torch.full((len(v),), r) for v, r in zip(data["log_probs"], data["rewards"], strict=True)
    ]
    for key in ("log_probs", "rollout_log_probs"):
        ours[key] = [torch.tensor(values) for values in data[key]]
    apply_credit(args, 0, ours)
    for number, values in enumerate(ours["advantages"]):
        shares = [values] if ranks == 1 else zigzag_shares(values, data["total_lengths"][number])
        for rank, share in enumerate(shares):
            assert found["advantages"][rank][number] == pytest.approx(share.tolist(), abs=1e-5)
    assert found["logged"]["rollout/staleness/measured"] == 1
    assert "rollout/round_number" not in found["logged"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_the_hosts_own_advantage_up_to_a_factor_is_whitened_to_the_same(
    ranks: int, repository: Path, slime_home: str, tmp_path: Path
):
    """Without families `anchored` is n / (n - 1) times what slime makes of rewards, which whitening takes off."""
    found = []
    for estimator in ("anchored", "grpo"):
        args = args_of(tmp_path, estimator, normalize_advantages=True)
        data = convert(args, [sample(n, reward, rollout("0", 5)) for n, reward in enumerate((1, 0, 0))])
        data["log_probs"] = data["rollout_log_probs"]
        found.append(
            in_slime(repository, slime_home, tmp_path, {"args": flags_of(args), "data": data, "ranks": ranks})
        )
    ours, slimes = (np.concatenate([np.concatenate(rank) for rank in each["advantages"]]) for each in found)
    assert ours == pytest.approx(slimes, abs=1e-4)
    assert np.abs(ours).max() > 0.5


def flags_of(args: Any) -> dict[str, Any]:
    """What a trainer's process gets of the job's flags: what can be written down."""
    return {k: v for k, v in vars(args).items() if k != "generate_state"} | FLAGS


def in_slime(repository: Path, slime_home: str, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    (folder / "data.pickle").write_bytes(pickle.dumps(given))
    done = subprocess.run(
        [
            repository / ".venv-miles" / "bin" / "python",
            Path(__file__).with_name("trainer.py"),
            folder / "data.pickle",
            folder / "result.json",
        ],
        env=os.environ | {"PYTHONPATH": slime_home},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())
