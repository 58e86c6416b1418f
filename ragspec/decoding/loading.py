"""Loading a target in the precision that suits the device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ragspec.decoding.cuda_graphs import GraphRecorder
from ragspec.decoding.native.build import BuildError
from ragspec.decoding.native.target import MisfitError, make_native_target
from ragspec.decoding.recorder import Recorder
from ragspec.decoding.target import Target
from ragspec.decoding.transformers_target import make_target
from ragspec.errors import ModelUnavailableError, SettingsError
from ragspec.models import ensure_target, fingerprint, model_label
from ragspec.settings import Settings

log = logging.getLogger(__name__)

#: `auto` is bfloat16 on CUDA. On CPU it is int8 where the processor multiplies bytes fast, there is a C++ compiler and the
#: kernels fit the model; else bfloat16 where the processor multiplies that fast; else float32.
Precision = Literal["auto", "float32", "bfloat16", "float16", "int8"]
#: `auto` runs decode steps as CUDA graphs where the device is CUDA, `off` nowhere.
CudaGraphs = Literal["auto", "off"]


def load_target(
    path: Path,
    device: str = "auto",
    precision: Precision = "auto",
    *,
    kernels: Path,
    threads: int = 0,
    name: str = "",
    cuda_graphs: CudaGraphs = "auto",
) -> Target:
    """Load a causal LM from a local folder and prove that our step gives what its own does.

    Args:
        path: folder with config, safetensors and tokenizer.
        device: auto, cpu, cuda, cuda:N.
        precision: see `Precision`.
        kernels: folder for the compiled int8 kernels.
        threads: CPU threads, 0 for torch's own choice.
        name: what the identity calls it; default the folder's name.
        cuda_graphs: see `CudaGraphs`.

    Raises:
        ModelUnavailableError: not a causal LM, no weights in safetensors, or an architecture whose attention we cannot
            stand in for (code `unsupported_architecture`).
        SettingsError: a device that this machine lacks, or int8 where it cannot be had.
    """
    if threads:
        torch.set_num_threads(threads)
    place = resolve_device(device)
    identity = f"{name or path.name}@{fingerprint(path)}"
    if precision == "int8" and place.type != "cpu":
        msg = f"RAGSPEC_PRECISION=int8 runs on CPU, and the device is {place}."
        raise SettingsError(msg, "Set RAGSPEC_PRECISION=auto, or RAGSPEC_DEVICE=cpu.")
    if precision == "int8" or (precision == "auto" and place.type == "cpu" and multiplies_bytes()):
        model, tokenizer = _read(path, torch.bfloat16)
        try:
            return make_native_target(model, tokenizer, f"{identity}+int8", kernels)
        except (BuildError, MisfitError) as error:
            if precision == "int8":
                msg = f"RAGSPEC_PRECISION=int8 cannot be had for {name or path}: {error}"
                raise SettingsError(msg, "Set RAGSPEC_PRECISION=auto.") from error
            log.warning("not in int8: %s", error, extra={"action": "load_target"})
    dtype = resolve_dtype(precision, place)
    model, tokenizer = _read(path, dtype)
    recorder = make_recorder(place, cuda_graphs)
    return make_target(model.to(place), tokenizer, f"{identity}+{_name(dtype)}", recorder)  # type: ignore[arg-type]


def load_configured(settings: Settings) -> Target:
    """Load the target that the settings name, fetching it if need be.

    Raises:
        ModelUnavailableError, SettingsError: see `load_target`.
    """
    return load_target(
        ensure_target(settings),
        settings.device,
        settings.precision,
        kernels=settings.kernels_folder,
        threads=settings.threads,
        name=model_label(settings.model),
        cuda_graphs=settings.cuda_graphs,
    )


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises:
        SettingsError: CUDA is asked for and there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        msg = f"RAGSPEC_DEVICE={device!r}, but torch finds no CUDA device here."
        raise SettingsError(msg, "Set it to auto or cpu, or install a CUDA build of torch and its driver.")
    return torch.device(device)


def make_recorder(device: torch.device, cuda_graphs: CudaGraphs) -> Recorder | None:
    """What records decode steps on a device, or None where they run kernel by kernel."""
    return GraphRecorder(device) if device.type == "cuda" and cuda_graphs == "auto" else None


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on CPUs that multiply it in hardware, else float32."""
    if precision != "auto":
        resolved: torch.dtype = getattr(torch, precision)
        return resolved
    if device.type == "cuda":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    return torch.bfloat16 if fast else torch.float32


def multiplies_bytes() -> bool:
    """Whether the processor has the instruction that the int8 kernels are written around (AVX-512 VNNI)."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


def _read(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        msg = f"The target at {path} cannot be loaded as a causal language model: {error}"
        raise ModelUnavailableError(
            msg, "Give RAGSPEC_MODEL a folder or id with config, tokenizer and safetensors."
        ) from error
    return model, tokenizer


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
