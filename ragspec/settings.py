"""Every RAGSPEC_* setting, once and typed. Nothing else in the project reads the environment.

Precedence, highest first: environment variables, `.env` in the working directory, the addresses that a running
`ragspec up` wrote to `RAGSPEC_HOME/run/services.json`, defaults.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ragspec.errors import ServiceUnavailableError, SettingsError

PREFIX = "RAGSPEC_"
#: What variables begin with that only the tests read.
_OF_TESTS = f"{PREFIX}TEST_"
#: Variables, with their values, that Kubernetes sets in every container for a service called `ragspec` or `ragspec-...`.
_OF_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST=|SERVICE_PORT[_=]|PORT_\d+_|PORT=(tcp|udp|sctp)://)")
#: What `ragspec up` writes while it runs: {"redis_url": ..., "database_url": ..., "chroma_url": ..., "flower_url": ...}
SERVICES_FILE = Path("run") / "services.json"
#: Names that stand for the models that ship as Python wheels.
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_EMBEDDER = "all-minilm-l6-v2"

#: A shard is claimed and lost as a whole; beyond this nothing is gained.
MAX_SHARD_SIZE = 1_000_000

#: What the address of a service begins with.
_SCHEMES = {"redis_url": ("redis", "rediss"), "chroma_url": ("http", "https")}

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """All settings; field `x` is read from `RAGSPEC_X`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
    )

    home: Path = Field(Path("~/.ragspec"), description="State of the embedded services, model cache, logs.")

    # Services. Unset means: the embedded one that `ragspec up` runs.
    redis_url: SecretStr | None = Field(None, description="Redis of the queue, redis:// or rediss://.")
    database_url: SecretStr | None = Field(None, description="PostgreSQL, postgresql://user:password@host/database.")
    chroma_url: SecretStr | None = Field(None, description="Chroma server, http:// or https://.")
    flower_port: int = Field(5555, ge=0, le=65535, description="Port of Flower under `ragspec up`; 0 takes a free one.")
    flower_user: str = Field("ragspec", description="User name that Flower asks for.")
    flower_password: SecretStr | None = Field(None, description="Flower's password; unset lets loopback in freely.")

    # Gateway
    gateway_port: int = Field(
        8080, ge=0, le=65535, description="Port of the HTTP gateway; 0 takes a free one under `ragspec up`."
    )
    gateway_access: Literal["open", "keys"] = Field(
        "open", description="open: whoever reaches the gateway is the tenant `default`; keys: an API key is asked for."
    )
    gateway_collection: str | None = Field(
        None, description="Collection of questions over HTTP that name none; unset takes the only one there is."
    )
    gateway_timeout: Seconds = Field(60, description="Seconds until an answer over HTTP is not wanted any more.")

    # Models
    model: str = Field(DEFAULT_MODEL, description="Target: a shipped name, a hub id or a local folder.")
    embedder: str = Field(DEFAULT_EMBEDDER, description="Embedder: a shipped name, a hub id or a local folder.")
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:N`; auto is cuda where there is one.")
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="auto: bfloat16 on CUDA; on CPU int8 where processor, compiler and model allow, else bfloat16 or float32.",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto", description="auto: on CUDA, decode steps run as CUDA graphs where the model allows it; off: never."
    )
    model_cache: Path | None = Field(None, description="Where models lie; default RAGSPEC_HOME/models.")

    # Engine
    max_batch: Positive = Field(16, description="Sequences decoded together.")
    context_window: int = Field(2048, ge=64, description="Tokens of prompt and answer; the model's limit caps it.")
    prefill_chunk: Positive = Field(512, description="Prompt tokens that one step carries along at most.")
    max_draft: int = Field(10, ge=0, le=64, description="Draft tokens per sequence and step; 0: no speculation.")
    head: str = Field(
        "auto",
        description="Speculation head: auto takes the shipped one of this target if there is one; none; or a folder, also of a "
        "published EAGLE-3 head.",
    )
    prefix_cache: float = Field(
        0.25, ge=0, le=1, description="Share of free memory for prefixes of finished prompts; 0: none is ever reused."
    )
    threads: int = Field(0, ge=0, description="CPU threads of the engine; 0 takes every core.")

    engine_socket: Path | None = Field(
        None, description="Unix socket of the engine that a Celery node feeds; `ragspec worker` sets it for its nodes."
    )

    # Prompt and retrieval
    prompt_template: Path | None = Field(None, description="A Jinja file in place of the default prompt.")
    passage_order: Literal["score", "shared"] = Field(
        "score", description="score: the best next to the question. shared: so that prompts share their beginnings."
    )
    on_no_context: Literal["answer", "no_context"] = Field(
        "answer", description="Where nothing was retrieved: answer anyway, or finish with `no_context`."
    )
    retriever: str | None = Field(
        None,
        description="`module:attribute` of a LangChain retriever, or what makes one, in place of Chroma.",
    )
    chunk_tokens: int = Field(256, ge=16, description="Size of a passage in the embedder's tokens.")
    chunk_overlap: int = Field(32, ge=0, description="Tokens that neighbouring passages share.")

    # Queue
    shard_size: Positive = Field(64, le=MAX_SHARD_SIZE, description="Questions per Celery message.")
    bulk_concurrency: Positive = Field(3, description="Bulk shards that one worker has in flight.")
    interactive_concurrency: Positive = Field(2, description="Interactive shards that one worker has in flight.")
    ask_concurrency: Positive = Field(64, description="Single questions of gateways that one worker has in flight.")
    heartbeat_interval: Seconds = Field(5, description="Seconds between two signs of life of a claim.")
    stale_after: Seconds = Field(20, description="Seconds without a sign of life after which a claim is void.")
    sweep_interval: Seconds = Field(5, description="Seconds between two sweeps for lost shards.")
    visibility_timeout: Seconds = Field(3600, description="Seconds until Redis redelivers what is unacknowledged.")
    shutdown_timeout: Seconds = Field(10, description="Seconds a node has on SIGTERM to hand back what is unanswered.")
    engine_timeout: Seconds = Field(120, description="Seconds without an engine step before a restart.")
    max_attempts: Positive = Field(
        5,
        description="Claims of one shard that are lost, as their worker or engine died, before its unanswered questions "
        "are failed; a claim that a stopping worker hands back does not count.",
    )

    @field_validator("home", "model_cache", "prompt_template", "engine_socket")
    @classmethod
    def _expand(cls, path: Path | None) -> Path | None:
        try:
            return path.expanduser().absolute() if path else path
        except RuntimeError as error:
            msg = f"no home folder is known for {path.parts[0]}" if path else str(error)
            raise ValueError(msg) from error

    @field_validator("redis_url", "chroma_url")
    @classmethod
    def _is_address(cls, url: SecretStr | None, of: ValidationInfo) -> SecretStr | None:
        schemes = _SCHEMES[str(of.field_name)]
        if url is not None and not _is_url(url.get_secret_value(), schemes):
            # What `urlsplit` says quotes the address, perhaps its password.
            known = " or ".join(f"{scheme}://host:port" for scheme in schemes)
            msg = f"must be {known}, the port a number; in a password write / ? # @ as %2F %3F %23 %40"
            raise ValueError(msg)
        return url

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
            msg = "must be auto, cpu, cuda or cuda:N"
            raise ValueError(msg)
        return device

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        # A claim that beats no sooner than it goes stale would lapse every time.
        for below, above in (("heartbeat_interval", "stale_after"), ("chunk_overlap", "chunk_tokens")):
            less, more = getattr(self, below), getattr(self, above)
            if less >= more:
                msg = f"{PREFIX}{below.upper()}={less:g} must be below {PREFIX}{above.upper()}={more:g}"
                raise ValueError(msg)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the addresses of a running `ragspec up` below everything a person wrote."""
        del file_secret_settings
        return init_settings, env_settings, dotenv_settings, RunningServices(settings_cls)

    @property
    def models_folder(self) -> Path:
        """The model cache."""
        return self.model_cache or self.home / "models"

    @property
    def kernels_folder(self) -> Path:
        """Where the int8 kernels lie once they are compiled."""
        return self.models_folder / "kernels"

    def require_redis(self) -> str:
        """Redis' URL, or an error that says how to get one."""
        return self._require("Redis", "redis_url")

    def require_database(self) -> str:
        """PostgreSQL's URL, or an error that says how to get one."""
        return self._require("PostgreSQL", "database_url")

    def require_chroma(self) -> str:
        """Chroma's URL, or an error that says how to get one."""
        return self._require("Chroma", "chroma_url")

    def _require(self, service: str, field: str) -> str:
        url: SecretStr | None = getattr(self, field)
        if url is not None:
            return url.get_secret_value()
        variable = PREFIX + field.upper()
        if (self.home / SERVICES_FILE).exists():
            raise ServiceUnavailableError(
                f"{service} is gone: the `ragspec up` of {self.home} is not running any more.",
                f"Start it again, or set {variable}.",
            )
        raise ServiceUnavailableError(
            f"{service} is neither running here nor configured.", f"Start it with `ragspec up`, or set {variable}."
        )


class RunningServices(PydanticBaseSettingsSource):
    """Addresses of the embedded services of this `RAGSPEC_HOME`, while they run."""

    def __call__(self) -> dict[str, Any]:
        """Read the services file; an unreadable one counts as none, and so does one that a killed `up` left behind."""
        home = Path(self.current_state.get("home") or Settings.model_fields["home"].default).expanduser()
        try:
            found = json.loads((home / SERVICES_FILE).read_text())
        except (OSError, ValueError):
            return {}
        from ragspec.services.record import is_held

        if not is_held(home):
            return {}
        known = {"redis_url", "database_url", "chroma_url"}
        return {k: v for k, v in found.items() if k in known} if isinstance(found, dict) else {}

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        del field
        return None, field_name, False


def load_settings(**overrides: Any) -> Settings:
    """Read all settings.

    Raises:
        SettingsError: names each variable that is wrong, what it holds and what is allowed.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise SettingsError(_explain(error), "`ragspec config` lists every setting.") from None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return load_settings()


def child_environment(**overrides: Any) -> dict[str, str]:
    """The environment for a process that we start: this one's, with the settings named overridden."""
    return dict(os.environ) | {PREFIX + name.upper(): str(value) for name, value in overrides.items()}


def _explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        reason = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:  # of several settings together; the reason names them
            lines.append(f"{reason}.")
            continue
        name = PREFIX + str(fault["loc"][0]).upper()
        field = Settings.model_fields.get(str(fault["loc"][0]))
        secret = field is not None and "SecretStr" in str(field.annotation)
        lines.append(f"{name}={'***' if secret else repr(fault['input'])}: {reason}.")
    return " ".join(dict.fromkeys(lines))


def _is_url(text: str, schemes: Collection[str]) -> bool:
    """Whether it is an address with one of the schemes; its port, where it has one, is a number up to 65535.

    Only Redis' may leave out the host: it is this machine then.
    """
    if not text.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        return False
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # the port, or brackets that do not close
        return False
    return port != 0 and (bool(parts.hostname) or parts.scheme in _SCHEMES["redis_url"])


def mask_url(secret: str) -> str:
    """The address without what lets one in: `redis://:hunter2@host/0` becomes `redis://***@host/0`."""
    scheme, separator, rest = secret.partition("://")
    if not separator:
        return "***"
    credentials, at, address = rest.rpartition("@")
    del credentials
    return f"{scheme}://{'***@' if at else ''}{address}"


def unknown_settings() -> dict[str, str]:
    """Variables of the environment and of `.env` that are called like settings and are none.

    Returns:
        Each one's name, and that of the setting nearest to it, or empty where none is near.
    """
    from pydantic_settings import DotEnvSettingsSource

    named: dict[str, str | None] = dict(os.environ)
    with suppress(OSError, ValueError):  # a `.env` that cannot be read is another matter
        named |= DotEnvSettingsSource(Settings).env_vars
    ours = {name.upper() for name, value in named.items() if not _OF_KUBERNETES.match(f"{name}={value}")}
    fields = [name.upper() for name in Settings.model_fields]
    strange = sorted(
        name.removeprefix(PREFIX) for name in ours if name.startswith(PREFIX) and not name.startswith(_OF_TESTS)
    )
    near = {name: difflib.get_close_matches(name, fields, n=1) for name in strange if name not in fields}
    return {PREFIX + name: PREFIX + found[0] if found else "" for name, found in near.items()}


def setting_origins() -> dict[str, str]:
    """Where each setting's value comes from: `environment`, `.env`, `ragspec up` or `default`."""
    from pydantic_settings import DotEnvSettingsSource, EnvSettingsSource

    environment = EnvSettingsSource(Settings)()
    dotenv = DotEnvSettingsSource(Settings)()
    running = RunningServices(Settings)
    running._set_current_state({**dotenv, **environment})  # noqa: SLF001 - pydantic offers no public way
    services = running()
    named = (("environment", environment), (".env", dotenv), ("ragspec up", services))
    return {
        name: next((origin for origin, found in named if name in found), "default") for name in Settings.model_fields
    }
