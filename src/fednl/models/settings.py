"""The settings of the backbone and of LoRA; free of torch, so that settings are checked before it loads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from fednl.section import Section

DEFAULT_LORA_RANK = 8
"""The rank of the LoRA arm of a comparison where `lora.rank` is 0."""


class BackboneSettings(Section):
    """Which frozen language model is used, where it runs, and in which precision.

    Args:
        id: a packaged name (`smollm2-135m`), a Hugging Face id, or a folder written by `save_pretrained`.
        device: `auto` (the first of CUDA, Apple's MPS, CPU that is there), `cpu`, `mps`, `cuda` or `cuda:N`.
        dtype: the backbone's own precision: `float32`, `bfloat16`, or `auto` (bfloat16 where the device has
            native instructions for it, else float32). What is trained stays float32 whatever this says.
    """

    id: str = Field(default="smollm2-135m", min_length=1)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"


class LoraSettings(Section):
    """A low-rank update `alpha / rank * B A` beside the frozen projections.

    Args:
        rank: the inner size of the update; 0 means no LoRA.
        alpha: the scale's numerator, above 0; left out it is `2 * rank`.
        targets: `all-linear` (the query, key, value, output, gate, up and down projections that the model
            has) or a comma list of module names such as `q_proj,v_proj`.
        local_lr: the learning rate of the LoRA arm of a comparison; left out it is `training.local-lr`.

    Source: Hu et al. 2021, "LoRA", section 4.1; plain LoRA: no bias, no dropout, no rsLoRA, no DoRA.
    """

    rank: int = Field(default=0, ge=0)
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    targets: str = "all-linear"
    local_lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @field_validator("targets")
    @classmethod
    def _names(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")]
        if not all(name.replace("_", "a").isalnum() for name in names if name != "all-linear"):
            raise ValueError("targets must be all-linear or a comma list of module names: q_proj,v_proj")
        if len(set(names)) != len(names) or ("all-linear" in names and len(names) > 1):
            raise ValueError("targets must name each module once, and all-linear stands alone")
        return ",".join(names)

    @property
    def scale_alpha(self) -> float:
        """The alpha that is used: the one set, else `2 * rank`."""
        return float(2 * self.rank) if self.alpha is None else float(self.alpha)


class ContextVectorSettings(Section):
    """Context vectors: what labelled examples leave in each layer, injected with a few trained coefficients.

    Args:
        position: which token of an example is read: `separator` (the line break after its label), `label` (the
            label's last token) or `last` (the last token before the label, where the answer is predicted).
        inject: `"all"` tokens, as published, or only the `"answer"`: from the token on at which it is predicted. What
            stands before is then the plain model's, so that its keys and values are computed once for all steps.
        keep_mb: how much of these a process keeps at most, in MB of 10^6 bytes; prompts beyond that are computed in
            every step, and 0 keeps none. It changes speed, and losses by rounding only.
        start_lambda: the vector's weight before training.
        start_beta: the weight of the layer's own output before training.
        clip_norm: the longest that what one example leaves may be, as one L2 norm over all layers; 0 for no limit.
        store: `"on"` keeps what a run ends with, by task, in the cache folder, and starts a run on the same task,
            model, tokenizer, template and precision from it, without a round of vectors. `"near"` does the same, and
            lets a task that is not known go on from the coefficients of like ones after its first round of them.
        noise_std: standard deviation of the noise on every number of a client's mean before it leaves. It is drawn from
            the run's seed, as everything here: it shows what noise costs, and hides nothing from who knows the seed.

    Source: I2CL (arXiv 2405.14660): 0.1, 1.0, the line break, and injection at the last token as one of its variants;
        the other positions ours, as IFed-ICL does not say; what is kept, clipping and noise ours.
    """

    position: Literal["separator", "label", "last"] = "separator"
    inject: Literal["all", "answer"] = "all"
    keep_mb: int = Field(default=2000, ge=0)
    start_lambda: float = Field(default=0.1, allow_inf_nan=False)
    start_beta: float = Field(default=1.0, allow_inf_nan=False)
    clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    store: Literal["off", "on", "near"] = "off"
    noise_std: float = Field(default=0.0, ge=0, allow_inf_nan=False)
