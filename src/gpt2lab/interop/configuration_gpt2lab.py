"""Settings of a model that gpt2lab trained, for transformers 5. MIT license.

An export holds a copy of this file and of modeling_gpt2lab.py, so it needs transformers and torch, but not gpt2lab:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

FORMAT = 2  # of config.json and the tensors' names; raised when older files would be misread


class GPT2LabConfig(PreTrainedConfig):
    """GPT-2, and what may differ from it. Format 1 lacked the options whose default is GPT-2's: norm_eps, head, ..."""

    model_type = "gpt2lab"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers declares a list)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "context_length",
    }

    def __init__(
        self,
        gpt2lab_format: int = FORMAT,
        n_layer: int = 12,
        n_head: int = 12,
        n_embd: int = 768,
        context_length: int = 1024,
        vocab_size: int = 50257,
        # rotary: RoPE with base 10,000, channel i paired with i + D/2; half_rotary: base 1024, half of the pairs stand
        positions: str = "learned",
        norm: str = "layernorm",  # or rmsnorm, without bias
        norm_eps: float = 1e-5,
        embedding_norm: str = "off",  # on: a norm before the first block
        qk_norm: str = "none",  # of queries and keys in each head before rotation: rmsnorm, or gainless
        attention_scale: float | None = None,  # of the scores; None = 1 / sqrt(D)
        activation: str = "gelu",  # GPT-2's tanh approximation; or relu2: ReLU squared
        head: str = "tied",  # to the embedding; untied: a matrix and a bias
        logit_cap: float = 0.0,  # c of c x / sqrt(x^2 + c^2); 0 = none
        dropout: float = 0.0,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Raise ValueError for a format or an option that these two files do not know."""
        if tie_word_embeddings is None:
            tie_word_embeddings = head == "tied"
        if gpt2lab_format not in (1, FORMAT):
            raise ValueError(f"config.json has format {gpt2lab_format}, these files read {FORMAT}")
        for name, value, known in (
            ("positions", positions, ("learned", "rotary", "half_rotary")),
            ("norm", norm, ("layernorm", "rmsnorm")),
            ("embedding_norm", embedding_norm, ("off", "on")),
            ("qk_norm", qk_norm, ("none", "rmsnorm", "gainless")),
            ("activation", activation, ("gelu", "relu2")),
            ("head", head, ("tied", "untied")),
            ("tie_word_embeddings", tie_word_embeddings, (head == "tied",)),
        ):
            if value not in known:
                raise ValueError(
                    f"{name} {value!r} is unknown; known: {', '.join(map(str, known))}"
                )
        self.gpt2lab_format = gpt2lab_format
        self.n_layer, self.n_head, self.n_embd = n_layer, n_head, n_embd
        self.context_length, self.vocab_size = context_length, vocab_size
        self.positions, self.norm, self.norm_eps = positions, norm, norm_eps
        self.embedding_norm, self.qk_norm, self.activation = embedding_norm, qk_norm, activation
        self.attention_scale, self.head, self.logit_cap = attention_scale, head, logit_cap
        self.dropout, self.initializer_range = dropout, initializer_range
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
