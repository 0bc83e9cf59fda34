"""The settings of `serve.yaml`, one frozen dataclass per section. Field docstrings are the user documentation.

Recipe settings sit beside the service's own keys in the `reef:` section; they are checked against the recipe's
`settings_type` by `config.load`, which also knows flags (`--engine.kind`), environment (`REEF_ENGINE__KIND`) and origins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class ReefSettings:
    """The service and its recipe."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback exposes the server to the network."""

    port: int = 8900
    """Port to listen on; 0 picks a free one."""

    home: str = ".reef"
    """Folder of all state, made with mode 0700."""

    token: str | None = None
    """Bearer token clients must send. Absent: made on first start and kept in `<home>/token` with mode 0600."""

    tokens: Sequence[str] = ()
    """Further valid tokens, for rotation."""

    default_scenario: str | None = "default"
    """Scenario of requests without the `x-reef-scenario` header; null makes the header mandatory."""

    implicit_scenarios: bool = True
    """Whether a first request creates its scenario."""

    durability: Literal["process", "power"] = "process"
    """What a receipt survives: a killed process, or also power loss (fsync before the receipt is out)."""

    recipe: str | None = None
    """Dotted path `module:Class` of the learning recipe; absent: record only."""

    training_mode: Literal["auto", "manual", "hybrid"] = "auto"
    """When jobs start: by themselves, on `reef train`, or both."""

    publish: Literal["auto", "review"] = "auto"
    """Whether winners are released at once or held for a person."""

    cadence: Literal["gated", "rolling"] | None = None
    """Overrides the recipe's own cadence."""

    push_wait_s: float = 300.0
    """Longest wait of a request for a weight push before it gets 503."""

    body_limit_bytes: int = 64 * 1024 * 1024
    """Largest request body."""

    import_limit_bytes: int = 1024 * 1024
    """Largest body of `/reef/records` and `/reef/records/batch`."""

    rate_per_s: float | None = None
    """Requests a second each token may send, with a burst of twice that; more get 429 with `retry-after`. Absent: no limit."""

    cors_origins: Sequence[str] = ()
    """Origins whose pages may call the server from a browser, such as `https://ui.example`; absent: none."""

    redact: str | None = None
    """Dotted path of a function that rewrites each record before it is stored."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What generates tokens."""

    kind: Literal["embedded", "sglang", "upstream"] = "embedded"
    """Engine: Reef's own CPU server, a real SGLang, or another provider."""

    model: str | None = None
    """Model name, folder or hub id; absent: smollm2-135m-instruct, or, upstream, what each client names."""

    url: str | None = None
    """Base URL of an upstream provider, or of an SGLang that already runs."""

    urls: Sequence[str] = ()
    """Base URLs of several SGLangs that already run, all with the same model and the same keys; instead of `url`."""

    replicas: int = 1
    """How many local engines are started; conversations stay with one, weights reach all of them or none."""

    router: Literal["auto", "sglang", "reef"] = "auto"
    """Who shares requests out among several SGLangs: its own router where it is installed (auto), always, or Reef."""

    api: Literal["openai", "anthropic", "responses"] = "openai"
    """Dialect of the upstream."""

    api_key: str | None = None
    """Key for the upstream; give it as `${VARIABLE}` or in a 0600 file named by `api_key_file`."""

    admin_key: str | None = None
    """Key for the control routes of an SGLang that already runs, where it has one of its own; absent: `api_key`."""

    api_key_file: str | None = None
    """File with the upstream key, mode 0600."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of a local engine."""

    threads: int | None = None
    """CPU threads of the embedded engine; absent: all cores the process may use (affinity, container quota)."""

    max_running_requests: int = 16
    """Requests a local engine runs at once; more wait in its queue."""

    context_length: int | None = None
    """Longest prompt plus answer in tokens; absent: the model's own, capped at 4096 on the embedded engine."""

    max_lora_rank: int = 64
    """Largest rank of a LoRA adapter a local engine accepts."""

    adapters: Literal["auto", "path", "tensors"] = "auto"
    """How SGLangs that already run get LoRA adapters: they read our files (path), or the tensors travel in the call (tensors).
    auto: tensors to other hosts, unless `trainer.transport` is `disk`, which says that they read our files."""

    python: str | None = None
    """Interpreter, or folder, of the environment SGLang is installed in; absent: Reef's own."""

    sglang: Mapping[str, Any] = field(default_factory=dict)
    """Native SGLang flags, checked against the installed SGLang and passed through."""

    start_timeout_s: float = 300.0
    """Longest wait for a local engine to become ready."""

    @property
    def served(self) -> str | None:
        """The one model that is served; None for an upstream engine whose clients choose."""
        return self.model or (None if self.kind == "upstream" else DEFAULT_MODEL)

    @property
    def name(self) -> str:
        """What a client writes that has no model of its own in mind."""
        return self.served or "default"


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The trainer subprocess."""

    method: Literal["lora", "full"] = "lora"
    """What is trained: a LoRA adapter, or all weights."""

    push: Literal["adapter", "merged", "full"] | None = None
    """How weights reach the engine: as a LoRA adapter, merged, or full; absent: by method."""

    transport: Literal["group", "ipc", "disk"] | None = None
    """The road of merged and full pushes: a process group (NCCL on GPUs, gloo on CPUs), the memory of one GPU that engine and
    trainer share by turns, or a checkpoint the engine reads itself from a folder both see; absent: a group for engines started
    here, disk for one reached by URL."""

    delta: bool = False
    """Of full checkpoints push only what the engine lacks: tensors that changed, or of those the values, where they are few."""

    bucket_mb: int = 64
    """Weights sent at once in a push, in MiB; each engine needs so much memory more, the trainer twice."""

    rank: int = 16
    """LoRA rank."""

    alpha: float = 32.0
    """LoRA alpha; the update is scaled by alpha / rank."""

    target_modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get an adapter."""

    world_size: int = 1
    """Trainer processes (one per GPU)."""

    hostfile: str | None = None
    """DeepSpeed hostfile (`HOST slots=N` a line): its launcher starts the trainer on all hosts, which must see the home;
    absent: `world_size` processes here."""

    launcher_args: Sequence[str] = ()
    """Further flags of DeepSpeed's launcher, for example `--ssh_port=2222`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of the forward pass; optimizer states are fp32."""

    zero_stage: int = 1
    """DeepSpeed ZeRO stage, 0 to 3."""

    micro_batch: int = 8
    """Samples per forward pass."""

    pack_tokens: int | None = None
    """Pack samples behind each other, up to this many tokens per forward pass; absent: `micro_batch` padded rows."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""

    seed: int = 0
    """Seed of everything random in training (new weights, order of samples)."""

    threads: int | None = None
    """CPU threads per trainer process; absent: all cores the process may use (affinity, container quota)."""

    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed configuration merged over Reef's own."""

    start_timeout_s: float = 300.0
    """Longest wait for the trainer to come up."""

    step_timeout_s: float = 3600.0
    """Longest silence of the trainer's heartbeat before it is restarted."""

    @property
    def rests(self) -> bool:
        """Whether the trainer holds no memory between steps, for the engine has it then."""
        return self.transport == "ipc"


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The gate every candidate passes before it is released."""

    suite: str | None = None
    """JSONL file, folder of Harbor tasks, `verifiers:TASKSET`, or dotted path; absent: the gate is open and says so."""

    split: Literal["all", "heldout", "development"] = "heldout"
    """Which items of the suite decide."""

    limit: int | None = None
    """At most this many items."""

    max_new_tokens: int = 128
    """Longest answer in tokens."""

    temperature: float = 0.0
    """Sampling temperature of the evaluation; 0 is greedy."""

    alpha: float = 0.05
    """Chance of publishing a candidate that is no better."""

    regression_margin: float = 0.0
    """Rolling cadence: a full gate rolls back a candidate shown worse than the last gated release by more than this."""

    smoke_items: int = 4
    """Items of the quick check of a rolling step."""

    max_kl: float = 1.0
    """Rolling cadence: largest mean KL in nats per token to the last gated release."""

    concurrency: int = 8
    """Answers asked for at once."""

    max_calls: int | None = None
    """Most calls of models one evaluation may make, its judge's included; absent: no limit."""

    max_tokens: int | None = None
    """Most tokens one evaluation may use, prompts and answers of model and judge together; absent: no limit."""

    max_money: float | None = None
    """Most money one evaluation may cost, by what the provider charges or by the prices below; absent: no limit."""

    price_prompt: float = 0.0
    """Money per million prompt tokens of the evaluated model, where the provider does not say what it charged."""

    price_output: float = 0.0
    """Money per million output tokens of the evaluated model."""

    judge_url: str | None = None
    """Base URL of the judge, an engine that speaks chat completions; absent: the deployment's own base model judges."""

    judge_model: str | None = None
    """Model name sent to the judge."""

    judge_api_key: str | None = None
    """Key for the judge; give it as `${VARIABLE}`."""

    judge_price_prompt: float = 0.0
    """Money per million prompt tokens of the judge."""

    judge_price_output: float = 0.0
    """Money per million output tokens of the judge."""

    canary_alpha: float = 0.05
    """Chance that a canary no better than the head is promoted, and that one no worse is taken back."""

    canary_margin: float = 0.0
    """A canary goes back when it was shown worse than the head by more than this, as a share of the range of scores."""

    score_low: float = 0.0
    """Lowest score of reports; lower ones count as this where releases are compared by their reports."""

    score_high: float = 1.0
    """Highest score of reports; higher ones count as this."""

    drift: Literal["off", "report", "rollback"] = "off"
    """Compare the served release again with the one before it: never; and say what was found; and go back when it is worse."""

    drift_every_s: float | None = 86400.0
    """Seconds between such comparisons; null: only when live scores fall."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """Retention and the release store."""

    keep_bytes: int | None = None
    """Evict records beyond this many bytes, oldest first; absent: keep all."""

    keep_days: float | None = None
    """Evict records older than this; absent: keep all."""

    unconsumed: Literal["keep", "evict"] = "keep"
    """Records beyond these limits that no recipe is done with (all of them where none learns): kept, or evicted too."""

    keep_checkpoints: int = 3
    """Trainer checkpoints kept besides those of gated releases."""

    lfs: Literal["auto", "always", "never"] = "auto"
    """Whether Git LFS manages large files: when the program is there, required, or never."""

    remote: str | None = None
    """Git remote the release chain is pushed to."""


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Metrics, tracing and logs."""

    metrics: bool = True
    """Serve Prometheus metrics at `/metrics`."""

    tracing: bool = False
    """Export OpenTelemetry spans (needs the `otel` extra)."""

    trackers: Sequence[str] = ()
    """Where the numbers of each step go besides `<home>/metrics/steps.jsonl`: `tensorboard`, `wandb`, `mlflow` (extras)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level written to `<home>/logs/reef.log`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole `serve.yaml`, checked. `recipe_settings` are the recipe's own keys, still raw."""

    reef: ReefSettings = field(default_factory=ReefSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    storage: StorageSettings = field(default_factory=StorageSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    recipe_settings: Mapping[str, Any] = field(default_factory=dict)
