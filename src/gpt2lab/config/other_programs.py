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
_PREPARE = "--data_dir, a folder made by gpt2lab prepare or gpt2lab data import"
# What is here, and the names of the same flag in nanoGPT, transformers and its examples, and LitGPT.
_SAME = {
    _BATCH: "batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size train.micro_batch_size",
    _ACCUMULATION: "gradient_accumulation_steps",
    "--total_batch_size, in tokens": "train.global_batch_size",
    "--context_length": "block_size max_seq_length train.max_seq_length",
    "--max_lr": "learning_rate lr optimizer.lr optimizer.init_args.lr",
    "--min_lr": "train.min_lr",
    "--lr_schedule, with --min_lr equal to --max_lr for a constant rate": "decay_lr",
    "--lr_schedule cosine, linear or wsd": "lr_scheduler_type",
    "--warmup_steps": "warmup_iters num_warmup_steps train.lr_warmup_steps",
    "--warmup_steps, in steps": "warmup_ratio",
    "--max_steps": "max_iters max_train_steps train.max_steps",
    "--max_steps (the decay ends with the run)": "lr_decay_iters",
    "--max_tokens": "train.max_tokens",
    "--num_epochs": "num_train_epochs epochs train.epochs",
    "--optimizer": "optim",
    "--weight_decay": "optimizer.weight_decay optimizer.init_args.weight_decay",
    "--beta1": "adam_beta1",
    "--beta2": "adam_beta2",
    "--adam_eps": "adam_epsilon",
    "--grad_clip": "max_grad_norm train.max_norm",
    "--eval_freq": "eval_interval eval_steps eval.interval",
    "--val_tokens, in tokens": "eval_iters eval.max_iters",
    "gpt2lab evaluate": "eval_only",
    "--log_freq": "log_interval logging_steps train.log_interval",
    "--checkpoint_freq": "always_save_checkpoint save_steps train.save_interval",
    "--keep_checkpoints": "save_total_limit",
    "--checkpoint_dir and --run_name": "out_dir output_dir",
    "--resume latest, or a checkpoint's folder": "resume_from_checkpoint resume_from",
    "--track wandb": "wandb_log wandb_project",
    "--track wandb; the run's name is --run_name": "wandb_run_name",
    "--use_tensorboard, --track wandb,trackio,mlflow": "report_to logger_name",
    _PREPARE: "dataset dataset_name train_file data data.path",
    "prepare_data.py --tokenizer; the data know theirs": "tokenizer_dir",
    "no setting: a thread of the trainer reads ahead": "num_workers dataloader_num_workers",
    "--model": "model_name",
    "--init_from RUN, a folder or hf:NAME": "model_name_or_path initial_checkpoint_dir",
    "--head tied or untied": "train.tie_embeddings",
    "always there; a model without biases is imported with biases of zero": "bias",
    "--dtype bf16, fp16 or fp32": "bf16 fp16 precision",
    "--compile on or off": "torch_compile",
    "--activation_checkpointing block": "gradient_checkpointing",
    "--parallel fsdp": "fsdp",
    "--parallel zero1 or fsdp": "deepspeed",
    "--gpus N": "devices",
    "torchrun --nnodes=N --nproc_per_node=N": "num_nodes",
    "chosen by --device": "backend",
}
FLAGS = {theirs: ours for ours, names in _SAME.items() for theirs in names.split()}

_TRUE_FALSE = {"true": "on", "false": "off"}
_PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("float32", "32-true", "32"), "fp32"),
    **dict.fromkeys(("float16", "16-mixed", "16-true"), "fp16"),
}
# Of flags that are ours: their values elsewhere.
VALUES = {
    "model": dict.fromkeys(("gpt2-small", "gpt2-124m", "gpt2-base"), "gpt2"),
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
