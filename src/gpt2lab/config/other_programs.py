"""Flags and values of other trainers, and what they are here: people type them for years. No torch."""

from __future__ import annotations

# Of this program's predecessor.
RENAMED = {
    "num_layers": "--n_layer",
    "embd_size": "--n_embd",
    "num_heads": "--n_head",
    "logdir": "--checkpoint_dir (logs live in the run's folder)",
    "tensorboard_dir": "--checkpoint_dir (TensorBoard files live in the run's folder)",
    "steps_per_epoch": "--num_epochs (an epoch is computed from the data)",
}

_BATCH = "--mini_batch_size N (sequences of a forward pass on each rank)"
_ACCUMULATION = (
    "--total_batch_size, the tokens of a step: N x --mini_batch_size x --context_length x ranks"
)
_RATE = "--max_lr"
_FOLDER = "--checkpoint_dir and --run_name"
_CONSTANT = "--lr_schedule, with --min_lr equal to --max_lr for a constant rate"
_PRECISION = "--dtype bf16, fp16 or fp32"
_WANDB = "--track wandb"
_TRACKERS = "--use_tensorboard, --track wandb,trackio,mlflow"
_CARDS = "--gpus N"
_WEIGHTS = "--init_from RUN, a folder or hf:NAME"
_CLIP = "--grad_clip"
_READING = "no setting: a thread of the trainer reads ahead"
_PREPARE = "--data_dir, a folder made by gpt2lab prepare or gpt2lab data import"

FLAGS = {
    # nanoGPT
    "batch_size": _BATCH,
    "block_size": "--context_length",
    "gradient_accumulation_steps": _ACCUMULATION,
    "learning_rate": _RATE,
    "max_iters": "--max_steps",
    "warmup_iters": "--warmup_steps",
    "lr_decay_iters": "--max_steps (the decay ends with the run)",
    "decay_lr": _CONSTANT,
    "eval_interval": "--eval_freq",
    "eval_iters": "--val_tokens, in tokens",
    "eval_only": "gpt2lab evaluate",
    "log_interval": "--log_freq",
    "always_save_checkpoint": "--checkpoint_freq",
    "out_dir": _FOLDER,
    "dataset": _PREPARE,
    "bias": "always there; a model without biases is imported with biases of zero",
    "backend": "chosen by --device",
    "wandb_log": _WANDB,
    "wandb_project": _WANDB,
    "wandb_run_name": f"{_WANDB}; the run's name is --run_name",
    # transformers and its examples
    "lr": _RATE,
    "per_device_train_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_eval_batch_size": _BATCH,
    "num_train_epochs": "--num_epochs",
    "epochs": "--num_epochs",
    "max_train_steps": "--max_steps",
    "lr_scheduler_type": "--lr_schedule cosine, linear or wsd",
    "num_warmup_steps": "--warmup_steps",
    "warmup_ratio": "--warmup_steps, in steps",
    "adam_beta1": "--beta1",
    "adam_beta2": "--beta2",
    "adam_epsilon": "1e-8, no setting",
    "max_grad_norm": _CLIP,
    "optim": "--optimizer",
    "output_dir": _FOLDER,
    "model_name_or_path": _WEIGHTS,
    "dataset_name": _PREPARE,
    "train_file": _PREPARE,
    "max_seq_length": "--context_length",
    "eval_steps": "--eval_freq",
    "save_steps": "--checkpoint_freq",
    "save_total_limit": "--keep_checkpoints",
    "logging_steps": "--log_freq",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "torch_compile": "--compile on or off",
    "gradient_checkpointing": "--activation_checkpointing block",
    "resume_from_checkpoint": "--resume latest, or a checkpoint's folder",
    "report_to": _TRACKERS,
    "num_workers": _READING,
    "dataloader_num_workers": _READING,
    "fsdp": "--parallel fsdp",
    "deepspeed": "--parallel zero1 or fsdp",
    # LitGPT
    "train.global_batch_size": "--total_batch_size, in tokens",
    "train.micro_batch_size": _BATCH,
    "train.max_tokens": "--max_tokens",
    "train.max_steps": "--max_steps",
    "train.epochs": "--num_epochs",
    "train.max_seq_length": "--context_length",
    "train.lr_warmup_steps": "--warmup_steps",
    "train.min_lr": "--min_lr",
    "train.max_norm": _CLIP,
    "train.save_interval": "--checkpoint_freq",
    "train.log_interval": "--log_freq",
    "train.tie_embeddings": "always tied",
    "eval.interval": "--eval_freq",
    "eval.max_iters": "--val_tokens, in tokens",
    "optimizer.lr": _RATE,
    "optimizer.init_args.lr": _RATE,
    "optimizer.weight_decay": "--weight_decay",
    "optimizer.init_args.weight_decay": "--weight_decay",
    "data": _PREPARE,
    "data.path": _PREPARE,
    "model_name": "--model",
    "precision": _PRECISION,
    "devices": _CARDS,
    "num_nodes": "torchrun --nnodes=N --nproc_per_node=N",
    "initial_checkpoint_dir": _WEIGHTS,
    "tokenizer_dir": "prepare_data.py --tokenizer; the data know theirs",
    "logger_name": _TRACKERS,
    "resume_from": "--resume latest, or a checkpoint's folder",
}

_TRUE_FALSE = {"true": "on", "false": "off"}
_PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("float32", "32-true", "32"), "fp32"),
    **dict.fromkeys(("float16", "16-mixed", "16-true"), "fp16"),
}
# Of flags that are ours: their values elsewhere.
VALUES = {
    "dtype": _PRECISIONS,
    "compile": _TRUE_FALSE,
    "device": {"gpu": "cuda", "mps": "cpu or cuda"},
    "optimizer": dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adam"), "adamw"),
    "lr_schedule": {
        "constant": "cosine with --min_lr equal to --max_lr",
        "warmup_stable_decay": "wsd",
    },
}

# Of `gpt2lab runs resume-command`.
_JOBS = {"output": {"k8s": "examples/kubernetes.yaml", "sky": "examples/skypilot.yaml"}}


def answer(name: str) -> str | None:
    """Return what another program's flag, without its dashes, is here; None if it is not known."""
    if name in RENAMED:
        return f"it is now {RENAMED[name]}"
    if name in FLAGS:
        return f"here it is {FLAGS[name]}"
    return None


def answer_value(name: str, value: object) -> str | None:
    """Return what a value, which a setting of ours has elsewhere and not here, is here; None if it is not known."""
    ours = (VALUES.get(name) or _JOBS.get(name, {})).get(str(value).lower())
    return None if ours is None else f"here it is {ours}"
