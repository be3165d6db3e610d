"""The real command, stopped from outside: what ends, what stays, what goes on."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fednl.errors import CheckpointError, FednlError, Interrupted
from fednl.runs import Run
from fednl.training import resume, train
from small_run import settings, tiny_backbone

BITS = ("final/params.safetensors", "best/params.safetensors", "results/needles.json", "results/needles.outcomes.jsonl")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def whole(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(config(backbone), tmp_path_factory.mktemp("whole") / "run")


def config(backbone: Path) -> Any:
    return settings(backbone, training={"rounds": 2, "local-steps": 4}, prefix={"cache": "disk"})


def bits(run: Run) -> list[bytes]:
    return [(run.path / name).read_bytes() for name in BITS]


# A test run started in the background may have been told to ignore Ctrl-C, and hands that down: the command starts
# here as it does at a terminal.
AT_A_TERMINAL = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from fednl.cli import main; main()"
)


@contextmanager
def command(*words: str, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """The command at work, with a folder of its own for temporary files."""
    temporary.mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", AT_A_TERMINAL, *words], **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(words, line):
            return
    pytest.fail(f"the command ended before it said {words}")


def wait_until_kept(temporary: Path) -> None:
    """Until something private lies in the folder for temporary files."""
    end_s = time.monotonic() + 60
    while not any(temporary.rglob("*.safetensors")):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert {stat.S_IMODE(path.stat().st_mode) for path in temporary.glob("fednl-*")} == {0o700}


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_with_two_workers_ends_everything_and_resumes_to_the_same_bits(
    backbone: Path, whole: Run, tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text(config(backbone).to_toml())
    run, kept = tmp_path / "run", tmp_path / "temporary"
    words = ["train", str(tmp_path / "x.toml"), "--out", str(run), "--set", "federation.parallel-clients=2"]
    with command(*words, temporary=kept) as it:
        wait_for(it, "round 1 of 2")
        wait_until_kept(kept)
        with pytest.raises(FednlError, match="another process is at work"):
            resume(run)
        it.send_signal(signal.SIGINT)
        # Workers hold the pipes as well: this returns once all of them are gone.
        out, err = it.communicate(timeout=30)
    assert (it.returncode, out) == (1, "")
    assert err.count("\n") == 1 and f"fednl train --resume {run}" in err
    assert not list(kept.glob("fednl-*")), "private activations must not outlive the run"
    assert not (run / "workers.json").exists() and (run / "final/params.safetensors").exists()
    assert bits(resume(run)) == bits(whole)


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_told_to_end_it_ends_as_after_ctrl_c_and_leaves_nothing_private(backbone: Path, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(config(backbone).to_toml())
    run, kept = tmp_path / "run", tmp_path / "temporary"
    with command("train", str(tmp_path / "x.toml"), "--out", str(run), temporary=kept) as it:
        wait_until_kept(kept)
        it.send_signal(signal.SIGTERM)
        out, err = it.communicate(timeout=30)
    assert (it.returncode, out) == (1, "") and f"fednl train --resume {run}" in err
    assert not list(kept.glob("fednl-*"))


def test_a_start_that_fails_leaves_no_folder_in_the_way(backbone: Path, tmp_path: Path) -> None:
    for section, key, value in [
        ("backbone", "id", str(tmp_path / "nowhere")),
        ("data", "filler", str(tmp_path / "nowhere.txt")),
        ("memory", "start", str(tmp_path / "nowhere")),
        ("federation", "quorum", 9),
    ]:
        with pytest.raises(FednlError, match=re.escape(str(value))):
            train(config(backbone).with_overrides([f"{section}.{key}={value}"]), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_run_that_fails_later_stays(backbone: Path, tmp_path: Path) -> None:
    def fail(event: Any) -> None:
        if event["event"] == "round-end":
            raise CheckpointError("the disk is full.")

    with pytest.raises(CheckpointError):
        train(config(backbone), tmp_path / "run", fail)
    assert (tmp_path / "run" / "checkpoints" / "round-1").is_dir()


@pytest.mark.parametrize("name", ["loading", "training", "measuring"])
def test_ctrl_c_in_any_phase_is_told_with_the_way_back(backbone: Path, tmp_path: Path, name: str) -> None:
    def stop(event: Any) -> None:
        if str(event.get("name", "")).startswith(name):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=f"fednl train --resume {re.escape(str(tmp_path / 'run'))}`"):
        train(config(backbone), tmp_path / "run", stop)
    assert (tmp_path / "run" / "config.json").exists()


def test_a_finished_run_resumes_to_itself(whole: Run) -> None:
    before = bits(whole)
    told: list[Any] = []
    resume(whole.path, told.append)
    assert bits(whole) == before
    assert [event["name"] for event in told] == ["loading the backbone and making the data"]


def test_no_private_text_is_in_the_run_folder(backbone: Path, whole: Run) -> None:
    from fednl.client import Bench

    data = Bench(config(backbone)).data
    texts = {event.text for splits in data.values() for one in splits.train + splits.test for event in one.events}
    texts |= {answer for splits in data.values() for one in splits.train + splits.test for answer in one.candidates}
    assert len(texts) > 50
    for path in whole.path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [text for text in texts if text.encode() in content], path


def test_the_run_records_what_it_was_made_of(backbone: Path, whole: Run) -> None:
    from fednl.data import load_filler

    facts = whole.read_json("partition.json")
    assert facts["filler_sha256"] == load_filler(str(backbone / "filler.txt")).sha256
    assert facts["dtype"] == "float32"
    assert facts["backbone"]["layers"] == 2 and len(facts["rows"]) == 9
