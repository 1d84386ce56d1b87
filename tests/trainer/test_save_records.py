"""How far each save came, as records beside the trajectory; and what the policy hands to the storage."""

from __future__ import annotations

import dataclasses
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_resume.checkpoint.base import SaveEvent
from hyper_resume.config import RunConfig, TrajectoryConfig
from hyper_resume.errors import CheckpointLockedError, CheckpointSaveError, ConfigError
from hyper_resume.trainer.callbacks import Callback
from hyper_resume.trainer.records import SaveRecords
from tests.ranks import run_ranks
from tests.trainer.tiny_training import at_step, run_config, saved_steps, train

pytestmark = pytest.mark.xdist_group("save-records")


def _config(folder: Path, **checkpoint: Any) -> RunConfig:
    config = run_config(folder / "saves", **{"training": {"max_steps": 5}, **checkpoint})
    return dataclasses.replace(config, trajectory=TrajectoryConfig(dir=str(folder / "records")))


def _lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records" / f"saves_rank_{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_save_is_staged_written_and_durable_in_that_order(tmp_path: Path, is_async: bool) -> None:
    train(_config(tmp_path, save_steps=2, is_async=is_async))
    lines = _lines(tmp_path)
    assert [(line["global_step"], line["state"]) for line in lines] == [
        (step, state) for step in (2, 4, 5) for state in ("staged", "written", "durable")
    ]
    for step in range(3):
        seconds = [line["seconds"] for line in lines[3 * step : 3 * step + 3]]
        assert 0 <= seconds[0] <= seconds[1] <= seconds[2]
    assert [line["path"] for line in lines[::3]] == [str(tmp_path / "saves" / f"global_step_{n}") for n in (2, 4, 5)]
    times = [datetime.fromisoformat(line["at"]) for line in lines]
    assert times == sorted(times)
    assert all(time.utcoffset() is not None for time in times)


def test_a_save_that_failed_says_so(tmp_path: Path) -> None:
    def block(trainer: Any) -> None:
        (tmp_path / "saves" / ".staging").rmdir()
        (tmp_path / "saves" / ".staging").write_text("in the way")

    with pytest.raises(CheckpointSaveError):
        train(_config(tmp_path, save_steps=2), callbacks=[at_step(4, block)])
    done = [(line["global_step"], line["state"]) for line in _lines(tmp_path)]
    assert done[:3] == [(2, "staged"), (2, "written"), (2, "durable")]
    assert (4, "durable") not in done


def test_a_torn_last_line_is_dropped_and_a_run_appends(tmp_path: Path) -> None:
    train(_config(tmp_path, save_steps=5))
    file = tmp_path / "records" / "saves_rank_0.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"state": "sta')
    train(_config(tmp_path, training={"max_steps": 6}, save_steps=6, restore_from="LATEST"))
    assert file.read_text().startswith(whole)
    assert [line["global_step"] for line in _lines(tmp_path)] == [5] * 3 + [6] * 3


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    records = SaveRecords(tmp_path / "records")
    event = SaveEvent(state="durable", global_step=1, path="x" * 300, seconds=0.5, at="2026-11-30T00:00:00+00:00")

    def write() -> None:
        for _ in range(50):
            records(event)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _lines(tmp_path) == [dataclasses.asdict(event)] * 400


def _train_together(folder: Path) -> None:
    train(_config(folder, save_steps=5))


def test_every_rank_writes_its_own(tmp_path: Path) -> None:
    run_ranks(_train_together, 2, tmp_path)
    for rank in range(2):
        assert [line["state"] for line in _lines(tmp_path, rank)] == ["staged", "written", "durable"]


def test_a_run_without_saves_leaves_no_records(tmp_path: Path) -> None:
    train(_config(tmp_path, save_ckpt=False))
    assert not (tmp_path / "records" / "saves_rank_0.jsonl").exists()


# ---- retention by a metric, the writer's lock


class Scores(Callback):
    """Sets a metric of its own before the checkpointer looks."""

    def on_step_end(self, state: Any = None, **kwargs: Any) -> None:
        step = self.trainer.state.global_step
        self.trainer.state.metrics = {"score": torch.tensor(float(-abs(step - 2)))}


def test_the_best_by_a_metric_of_the_trainer_is_kept(tmp_path: Path) -> None:
    config = _config(tmp_path, save_steps=1, keep_best=1, keep_best_metric="score", keep_best_mode="max")
    train(config, callbacks=[Scores])
    assert saved_steps(tmp_path / "saves") == [2, 5]
    manifest = json.loads((tmp_path / "saves" / "global_step_2" / "manifest.json").read_text())
    assert manifest["metrics"] == {"score": 0.0}


def test_the_loss_is_the_metric_unless_another_is_named(tmp_path: Path) -> None:
    records = train(_config(tmp_path, save_steps=1, keep_best=1))
    best = min(records, key=lambda record: record.loss).global_step
    assert saved_steps(tmp_path / "saves") == sorted({best, 5})


def test_without_keep_best_no_metric_is_asked_for(tmp_path: Path) -> None:
    train(_config(tmp_path, save_steps=2, keep_last=1, keep_best_metric="absent"))
    assert saved_steps(tmp_path / "saves") == [5]
    manifest = json.loads((tmp_path / "saves" / "global_step_5" / "manifest.json").read_text())
    assert manifest["metrics"] == {}


def _train_without_the_metric(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        train(_config(folder, save_steps=2, keep_best=1, keep_best_metric="absent"))
    return str(caught.value)


def test_a_metric_that_nobody_has_is_an_error_at_the_first_save_on_every_rank(tmp_path: Path) -> None:
    messages = run_ranks(_train_without_the_metric, 2, tmp_path)
    assert len(set(messages)) == 1
    assert "there is no metric 'absent'" in messages[0]
    assert "checkpoint.keep_best_metric" in messages[0]
    assert saved_steps(tmp_path / "saves") == []


def _try_to_train(folder: Path) -> str:
    try:
        train(_config(folder, save_steps=5, restore_from="LATEST"))
    except CheckpointLockedError as error:
        return str(error)
    return "trained"


def test_a_second_run_in_the_same_directory_is_refused_before_it_trains(tmp_path: Path) -> None:
    results: list[Any] = []

    def try_it(trainer: Any) -> None:
        results.extend(run_ranks(_try_to_train, 2, tmp_path))

    train(_config(tmp_path, save_steps=2), callbacks=[at_step(3, try_it)])
    assert len(results) == 2
    assert "trained" not in results
    assert [line["global_step"] for line in _lines(tmp_path)] == [2] * 3 + [4] * 3 + [5] * 3
