"""All settings of a run: each field states its type, default, help, bounds and resume policy.

The code sees nested dataclasses, people see flat flags: a field's name is its flag. Resume policy: a `free` setting may
change on resume, a `guarded` one needs --allow_change, a `fixed` one never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

Policy = Literal["free", "guarded", "fixed"]
HellaSwagMetrics = Literal["all", "harness", "tutorial"]
ModelName = Literal[
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt2-nano",
    "gpt2-micro",
    "gpt2-mini",
    "modern-small",
    "modern-nano",
    "modern-micro",
    "modern-mini",
    "speedrun",
]

Parallel = Literal["ddp", "zero1", "fsdp"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
ResidualDtype = Literal["auto", "fp32", "bf16"]
ActivationCheckpointing = Literal["none", "block", "selective"]
Optimizer = Literal["adamw", "muon", "normuon"]
AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math"]

T = TypeVar("T")

RecipeName = Literal["pretrain", "finetune"]

TRACKERS = ("wandb", "trackio", "mlflow")
LENGTHS = ("max_steps", "max_tokens", "num_epochs")  # the length of a run, in three units


def _option(default: T, help: str, policy: Policy, bounds: dict[str, float]) -> T:
    # Typed as the default's own type, as dataclasses.field is, so that type checkers see plain fields.
    return field(default=default, metadata={"help": help, "policy": policy, **bounds})


def free(default: T, help: str, **bounds: float) -> T:
    """Declare a setting that a resumed run may change without asking; `bounds`: `least` or `above`, `most`.

    With `draws_dropout` it is guarded where there is dropout: another value means other masks.
    """
    return _option(default, help, "free", bounds)


def guarded(default: T, help: str, **bounds: float) -> T:
    """Declare a setting that changes the training computation: a resume needs --allow_change NAME."""
    return _option(default, help, "guarded", bounds)


def fixed(default: T, help: str, **bounds: float) -> T:
    """Declare a setting that decides the shapes or the initial values of the weights: it can never change on resume."""
    return _option(default, help, "fixed", bounds)


@dataclass(frozen=True)
class ModelConfig:
    """The network's shape, in GPT-2's own names."""

    model: ModelName = free(
        "gpt2", "preset that sets the shape and, for small ones, batch, rate and data"
    )
    n_layer: int = fixed(12, "transformer blocks", least=1, most=10_000)
    n_head: int = fixed(12, "attention heads per block", least=1, most=10_000)
    n_embd: int = fixed(768, "width of the residual stream", least=1, most=1_000_000)
    context_length: int = fixed(1024, "tokens per training window, T", least=1, most=100_000_000)
    vocab_size: int = fixed(
        50304,
        "rows of the embedding; default as the tokenizer of the data needs, a multiple of 128. Those above its ids "
        "are padding, never sampled or scored",
        least=2,
        most=100_000_000,
    )
    # Not a flag: the tokenizer of the data decides.
    num_tokens: int = field(
        default=50257,
        metadata={"help": "ids of the tokenizer", "policy": "fixed", "least": 2, "is_hidden": True},
    )
    dropout: float = guarded(
        0.0, "dropout probability in embedding, attention and residual branches"
    )
    positions: Literal["learned", "rotary", "half_rotary"] = fixed(
        "learned",
        "learned: GPT-2's position embeddings; rotary: rotary position embeddings (RoPE); half_rotary: RoPE of half of "
        "a head's channel pairs, base 1024",
    )
    norm: Literal["layernorm", "rmsnorm"] = fixed(
        "layernorm", "layernorm: with bias, as GPT-2; rmsnorm: RMSNorm without bias"
    )
    norm_eps: float = fixed(1e-5, "what a norm adds to the mean square", above=0, most=1)
    embedding_norm: Literal["off", "on"] = fixed("off", "on: a norm before the first block too")
    qk_norm: Literal["none", "rmsnorm", "gainless"] = fixed(
        "none",
        "rmsnorm: normalize queries and keys in each head; gainless: the same without a learned gain",
    )
    attention_scale: float | None = fixed(
        None, "factor of the attention scores; default 1 / sqrt(head width)", above=0
    )
    activation: Literal["gelu", "relu2"] = fixed(
        "gelu", "activation of the MLP; relu2 = ReLU squared"
    )
    head: Literal["tied", "untied"] = fixed(
        "tied", "tied: the token embedding is the head; untied: the head has a matrix and a bias"
    )
    logit_cap: float = fixed(
        0.0, "soft cap c of the logits, c x / sqrt(x^2 + c^2); 0 = none", least=0
    )

    @property
    def id_limit(self) -> int:
        """The ids of text are below it; rows of the embedding from here up are padding."""
        return min(self.vocab_size, self.num_tokens)


@dataclass(frozen=True)
class InitConfig:
    """Which weights a fresh run starts with."""

    weight_init: Literal["gpt2", "fan_in"] = fixed(
        "gpt2",
        "distribution of random weights; fan_in: N(0, 1) for the embedding, 0 for projections and an untied head, "
        "variance 0.33 / fan-in for other matrices",
    )
    init_from: str | None = fixed(
        None,
        "start from the weights and architecture of a run, a checkpoint, a Hugging Face folder, or hf:NAME; "
        "default random weights. Optimizer, step and data start from the beginning",
    )


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, in which order."""

    data_dir: tuple[str, ...] = free(
        ("data/fineweb_edu",),
        "folder of token shards made by `gpt2lab prepare`, or a mixture of several, each as PATH:WEIGHT "
        "(pretraining only)",
    )
    data_weights_at: tuple[str, ...] = guarded(
        (),
        "mixture only: other weights from a number of tokens on, as TOKENS:WEIGHT,WEIGHT,... in the order of "
        "--data_dir, e.g. 900M:0.2,0.8",
    )
    max_source_epochs: tuple[str, ...] = free(
        (),
        "maximum epochs per source; longer runs are rejected: N for every source, NAME:N for one",
    )
    shuffle: Literal["shards", "windows", "none"] = guarded(
        "shards",
        "shards: permute shards in every epoch but the first; windows: permute single windows in every epoch",
    )
    seed: int = guarded(1337, "seed of initial weights, data order and dropout", least=0)


@dataclass(frozen=True)
class BatchConfig:
    """How many tokens an update sees, and how many one forward pass."""

    total_batch_size: int = guarded(524_288, "tokens per optimizer step over all ranks", least=1)
    mini_batch_size: int = free(
        16,
        "sequences per forward pass on each rank (guarded when dropout > 0); pretraining takes `auto` too",
        least=1,
        draws_dropout=True,
    )


def uses_muon(optimizer: Optimizer) -> bool:
    """Tell whether Muon, in either form, trains the matrices of the blocks."""
    return optimizer in ("muon", "normuon")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate."""

    optimizer: Optimizer = guarded(
        "adamw",
        "muon: Muon for the matrices of the blocks, AdamW for all other weights; normuon: Muon, each row of an update "
        "divided by its usual norm",
    )
    max_lr: float = guarded(6e-4, "peak learning rate", above=0)
    muon_lr: float | None = guarded(
        None,
        "muon and normuon: peak learning rate of their matrices, scaled to match AdamW; default max_lr",
        above=0,
    )
    embedding_lr: float | None = guarded(
        None, "AdamW's peak learning rate of the embeddings; default max_lr", above=0
    )
    head_lr: float | None = guarded(
        None, "AdamW's peak learning rate of an untied head; default max_lr", above=0
    )
    vector_lr: float | None = guarded(
        None, "AdamW's peak learning rate of biases and norms; default max_lr", above=0
    )
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = guarded(
        "match_rms_adamw",
        "factor of Muon's updates of (r, c): 0.2 sqrt(max(r, c)), or the original sqrt(max(1, r / c))",
    )
    newton_schulz: Literal["fast", "exact"] = guarded(
        "fast",
        "Muon's iterations: 5 of (3.4445, -4.775, 2.0315), or 12 of (2, -1.5, 0.5), which converge to 1",
    )
    min_lr: float | None = guarded(None, "final learning rate; default max_lr / 10", least=0)
    warmup_steps: int | None = guarded(
        None, "linear warm-up steps; default 715 or a tenth of the run, whichever is less", least=0
    )
    lr_schedule: Literal["cosine", "linear", "wsd", "trapezoid"] = guarded(
        "cosine", "decay after warm-up; trapezoid: wsd that reaches min_lr one step after the last"
    )
    wsd_decay: float = guarded(
        0.2, "wsd and trapezoid: fraction of the run, at its end, in which the rate decays"
    )
    wsd_shape: Literal["linear", "sqrt"] = guarded(
        "linear", "wsd: the decay falls in a line, or by 1 - sqrt of its part done"
    )
    weight_decay: float = guarded(
        0.1, "weight decay of matrices, also Muon's (biases and norms are not decayed)", least=0
    )
    adamw_decay: float | None = guarded(
        None,
        "muon and normuon: weight decay of all that AdamW trains, biases and norms too; default weight_decay without "
        "these",
        least=0,
    )
    beta1: float = guarded(0.9, "AdamW's decay of the mean gradient", least=0)
    beta2: float = guarded(0.95, "AdamW's decay of the mean squared gradient", least=0)
    adam_eps: float = guarded(
        1e-8,
        "added to the root of AdamW's mean squared gradient; gradients are means over tokens",
        above=0,
    )
    grad_clip: float = guarded(1.0, "clip the gradient to this L2 norm; 0 = no clipping", least=0)
    average_tail: float = free(
        0.0,
        "keep the mean of the weights over this last fraction of the run, measured at its end, for `runs average RUN`; "
        "0 = none",
        least=0,
        most=1,
    )
    on_spike: Literal["warn", "skip", "rewind"] = guarded(
        "warn",
        "on a loss 6 standard deviations above the last 128: warn, skip the update, or rewind and skip the data",
    )

    @property
    def has_muon(self) -> bool:
        """Tell whether Muon, in either form, trains the matrices of the blocks."""
        return uses_muon(self.optimizer)


@dataclass(frozen=True)
class LengthConfig:
    """How long: at most one of the three may be typed."""

    max_steps: int | None = guarded(None, "optimizer steps", least=1)
    max_tokens: int | None = guarded(None, "tokens, rounded down to whole steps", least=1)
    num_epochs: float | None = guarded(
        None, "passes over the training split; default 1 if none of the three is given", above=0
    )
    max_hours: float | None = free(
        None,
        "hours that one start may take: it saves and stops before; resume to continue",
        above=0,
    )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while training. A frequency of 0 means: only after the last step."""

    eval_freq: int = free(250, "steps between validation losses", least=0)
    val_tokens: int = free(
        10_485_760,
        "validation tokens, spread evenly over the split (less if it is smaller)",
        least=1,
    )
    sample_freq: int = free(250, "steps between text samples", least=0)
    sample_prompt: str = free("Hello, I'm a language model,", "start of every text sample")
    sample_tokens: int = free(48, "new tokens of a text sample", least=1)
    hellaswag_freq: int = free(
        250,
        "steps between HellaSwag evaluations; typing it turns them on, see --hellaswag_path",
        least=0,
    )
    hellaswag_path: Path | None = free(
        None,
        "HellaSwag items, one JSON object per line; without it the evaluation is off, unless another "
        "--hellaswag flag is given: then the validation set is downloaded once to data/hellaswag/",
    )
    keep_token_losses: bool = free(
        False,
        "keep the loss of every validation token of the last step (2 bytes each), for `compare --explain`",
    )
    early_stopping_patience: int = free(
        0,
        "stop and save after N validation losses in a row without improvement; 0 = never",
        least=0,
    )
    hellaswag_limit: int = free(
        0, "score a fixed random subset of N HellaSwag items; 0 = all", least=0
    )
    hellaswag_metrics: HellaSwagMetrics = free(
        "all",
        "harness = acc and acc_norm, tutorial = acc_token_norm; each costs half of the time of all",
    )
    core: Path | None = free(
        None, "score CORE while training: the folder or zip of DCLM's evaluation bundle"
    )
    core_freq: int = free(0, "steps between CORE evaluations", least=0)
    core_limit: int | None = free(None, "of each task of CORE only N items", least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept, and where."""

    checkpoint_dir: Path = free(Path("checkpoints"), "folder that holds the runs")
    run_name: str | None = free(
        None, "folder of this run; default MODEL_YYYYmmdd-HHMMSS, on resume the newest run"
    )
    checkpoint_freq: int = free(
        250, "steps between rolling checkpoints; 0 = only after the last", least=0
    )
    checkpoint_minutes: float = free(
        30.0, "also save when the last save is this many minutes old; 0 = never", least=0
    )
    async_checkpoint: Literal["auto", "on", "off"] = free(
        "auto",
        "on: a separate thread writes rolling checkpoints while training continues; auto = on with a GPU",
    )
    epoch_checkpoints: Literal["auto", "on", "off"] = free(
        "auto",
        "on: keep a checkpoint of the end of every epoch; auto = on in runs of at most 4 epochs",
    )
    keep_checkpoints: int = free(
        10, "rolling checkpoints kept, in addition to labelled ones", least=1
    )
    keep_emergency_checkpoints: int = free(
        10, "emergency checkpoints kept, of interrupted starts", least=1
    )
    checkpoint_mirror: str | None = free(
        None,
        "copy every checkpoint in the background to s3://BUCKET/PATH, gs://... or file:///..., and let --resume auto "
        "or latest fetch the newest from there",
    )


@dataclass(frozen=True)
class LogConfig:
    """What is shown. Every step is in metrics.jsonl, whatever the console shows."""

    log_freq: int = free(10, "steps between console lines", least=1)
    verbose: bool = free(False, "print all facts of a start instead of six lines; log.txt has them")
    use_tensorboard: bool = free(False, "mirror the metrics to TensorBoard files in the run folder")
    histogram_freq: int = free(
        0, "steps between histograms of weights and gradients in TensorBoard; 0 = none", least=0
    )
    track: str | None = free(
        None,
        "mirror the metrics to experiment trackers, each from a separate process: wandb, trackio, mlflow (separated by "
        "commas; extras to install)",
    )
    use_wandb: bool = free(False, "the same as --track wandb")

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers wanted, each once."""
        named = [name.strip() for name in (self.track or "").split(",") if name.strip()]
        return tuple(dict.fromkeys(["wandb", *named] if self.use_wandb else named))


@dataclass(frozen=True)
class SystemConfig:
    """Hardware, parallelism, and hang and drift detection."""

    device: Literal["auto", "cpu", "cuda"] = free("auto", "auto = cuda if there is one")
    dtype: Dtype = guarded(
        "auto",
        "precision of matrix products, weights stay fp32; auto = bf16 where the hardware has it, "
        "fp16 on older GPUs with tensor cores, else fp32",
    )
    residual_dtype: ResidualDtype = guarded(
        "auto",
        "precision of the residual stream where dtype is bf16; auto = bf16 on CUDA, fp32 on CPUs",
    )
    compile: Literal["auto", "on", "off"] = free(
        "auto",
        "torch.compile; auto = on, but on CPU only from 200 steps up (guarded when dropout > 0)",
        draws_dropout=True,
    )
    attention: AttentionBackend = free(
        "auto",
        "CUDA only: attention kernel that a training step must use; auto = torch's choice, shown at the start",
    )
    parallel: Parallel = free(
        "ddp", "ddp: full replica; zero1: optimizer state sharded; fsdp: everything sharded"
    )
    activation_checkpointing: ActivationCheckpointing = free(
        "none",
        "what the backward pass recomputes instead of storing: full blocks, or all but their matrix products",
    )
    ddp_bucket_mb: float = free(
        25.0, "MiB of gradients per all-reduce of ddp and zero1", least=1, most=1_000_000
    )
    fsdp_param_dtype: Literal["fp32", "bf16"] = guarded(
        "fp32",
        "precision in which fsdp gathers the blocks' matrices; bf16 needs dtype bf16, and gradients are summed in fp32",
    )
    fsdp_offload: bool = free(
        False, "fsdp, CUDA only: keep weights and optimizer state in the CPU's memory (slow)"
    )
    reduce: Literal["fast", "exact"] = guarded(
        "fast", "exact: the same bits on any world size (slow, one gradient per micro-batch)"
    )
    deterministic: bool = free(
        False, "CUDA only: deterministic kernels, the same bits in every run (slower)"
    )
    hang_seconds: float = free(
        600.0,
        "exit with code 78 when a phase of a step takes longer (three times as long the first time); 0 = never",
        least=0,
    )
    drift_check_freq: int = free(
        250,
        "steps between comparisons of the weights of all ranks (and at every save); 0 = only at saves",
        least=0,
    )


@dataclass(frozen=True)
class TuningConfig:
    """Fine-tuning; in a pretraining run `instructions` is None."""

    instructions: str | None = free(
        None,
        "conversations to train on: a .jsonl, .json or .parquet file, hf:NAME, or `demo` (a small set that ships with "
        "the code)",
    )
    val_fraction: float = guarded(
        0.1, "fraction of the conversations held out for validation, chosen by a hash of their text"
    )
    packing: Literal["on", "off"] = guarded(
        "on",
        "on: several conversations per row, each attends only to itself; off: one per row, then padding",
    )
    lora_r: int = fixed(
        0, "rank of LoRA adapters, trained instead of the weights; 0 = train all weights", least=0
    )
    lora_alpha: float = fixed(16.0, "adapter output is scaled by lora_alpha / lora_r", above=0)
    lora_targets: str = fixed(
        "c_attn,c_fc,c_proj",
        "linear layers that get adapters: comma-separated suffixes of module names",
    )


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    init: InitConfig = field(default_factory=InitConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)  # flags of fine-tuning alone
