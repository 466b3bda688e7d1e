"""What the keys of a config.json mean where a class does not read them: harmless, neutral at some value, or numerics.

Keys that no table knows are listed in a note.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: Keys that no number depends on, or that this package settles itself.
HARMLESS = frozenset(
    "_attn_implementation _commit_hash _experts_implementation _flash_attn_2_enabled _name_or_path _model_name_or_path "
    "add_cross_attention architectures attn_implementation auto_map aux_loss_alpha bad_words_ids "
    "chunk_size_feed_forward classifier_dropout compression_config dtype ep_size "
    "experts_implementation finetuning_task gradient_checkpointing id2label is_decoder is_encoder_decoder "
    "keys_to_ignore_at_inference label2id language max_seq_len mlp_dropout model_max_length model_type name_or_path "
    "num_labels num_mtp_layers num_nextn_predict_layers output_attentions output_hidden_states output_router_logits "
    "pipeline_tag prefix pretraining_tp problem_type quantization quantization_config rescale_prenorm_residual "
    "return_dict router_aux_loss_coef sep_token_id seq_aux task_specific_params tf_legacy_loss tie_encoder_decoder "
    "tie_last_hidden_states tie_word_embeddings tokenizer_class tokenizer_type torch_dtype torchscript "
    "transformers_version trust_remote_code unsloth_fixed unsloth_version use_bfloat16 use_cache "
    "use_flash_attention use_flash_attention_2 use_flash_attn "
    # Settings of text generation that older versions wrote here.
    "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty length_penalty max_length "
    "max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
    "num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate suppress_tokens temperature top_k top_p typical_p".split()
)
_HARMLESS_NAME = re.compile(
    r"(_token_ids?|_token_index|_token)$|^(initializer|summary)_|_(initializer_range|init_std)$"
)
#: Keys of the parts of a wrapper that are not run.
OTHER_PARTS = re.compile(r"image|vision|visual|video|audio|speech|multi_?modal|projector|^mm_|_config$|^[be]o[iavs]_")
DROPOUT = re.compile(r"dropout|_pdrop$")
WINDOW = re.compile(
    r"window|layer_types|attention_types|attn_types|local_attention|attention_chunk|chunk_attention|global_attn|"
    r"full_attention|attn_layer"
)
_HEADS = re.compile(r"^(n_heads?|num_heads|num_attention_heads|num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads)$")
_HEAD_SIZE = re.compile(r"^(head_dim|head_size|kv_channels|attention_head_size|v_head_dim|qk_head_dim|d_kv)$")
ROPE = re.compile(r"rope|rotary|yarn|position_embedding_type|pos_emb|nope")
QK_NORM = re.compile(r"qk_?(layer)?_?norm|(^|[._])(q|k|query|key)_(layer)?norm|use_qk|qk_l2")
#: What a key that a class does not read would change, by the first pattern that its name matches.
NUMERICS = (
    (re.compile(r"soft_?cap|logits?_cap"), "a soft-cap"),
    (WINDOW, "the attention window"),
    (re.compile(r"sink"), "attention sinks"),
    (re.compile(r"alibi|relative_attention|attention_bias_type"), "a bias of the scores"),
    (ROPE, "position embeddings"),
    (re.compile(r"clip_qkv|qkv_clip|clip_q|clip_k"), "clipping of q, k and v"),
    (QK_NORM, "a norm of q and k"),
    (_HEADS, "the number of heads"),
    (re.compile(r"multi_query|new_decoder_architecture"), "the number of heads"),
    (_HEAD_SIZE, "the size of a head"),
    (re.compile(r"multiplier|logits?_scal|scale_(attn|emb|depth|weights)|(attn|attention|softmax|embed|residual)_scale|"
                r"scaling_factor_attn|temperature|mup|dim_model_base|^scale_"), "a scale"),
    (re.compile(r"bidirectional|^is_causal$|^causal$|prefix_lm"), "which keys are visible"),
    (re.compile(r"parallel_(residual|attn)|attn_output_gate|gated_attention|attention_gate|differential"),
     "the attention block"),
    (re.compile(r"pruned_heads"), "the heads"),
)  # fmt: skip
#: Keys for which True is what every class does.
_TRUE_IS_NEUTRAL = frozenset({"is_causal", "causal", "scale_attn_weights", "use_rope", "use_rotary", "rope"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides whether a value that is not read is neutral."""

    num_heads: object
    head_size: object
    max_positions: object
    #: True when the model rotates q and k.
    rotates: bool
    #: True when the model norms q and k.
    norms_qk: bool
    #: True when config.json switches its windows off (use_sliding_window false).
    windows_off: bool


def is_harmless(key: str) -> bool:
    """True when no number depends on a key."""
    return key in HARMLESS or bool(_HARMLESS_NAME.search(key))


def numerics(key: str) -> str | None:
    """What a key would change in the numbers of attention; None for a key that no pattern knows."""
    return next((what for pattern, what in NUMERICS if pattern.search(key)), None)


def is_neutral(key: str, value: object, shape: Shape) -> bool:
    """True when a key that is not read changes nothing at this value."""
    if value is None or value in ({}, [], ""):
        return True
    if key in _TRUE_IS_NEUTRAL:
        return value is True and (shape.rotates or not ROPE.search(key))
    if value is False:
        return True
    if WINDOW.search(key):
        return shape.windows_off or _covers_all(value, shape.max_positions)
    if QK_NORM.search(key):
        return value is True and shape.norms_qk
    if _HEADS.search(key):
        return value == shape.num_heads
    if _HEAD_SIZE.search(key):
        return value == shape.head_size
    if "position_embedding_type" in key:
        return value == ("rope" if shape.rotates else "absolute")
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1 and "type" not in key


def _covers_all(value: object, max_positions: object) -> bool:
    if isinstance(value, list):
        return all(item == "full_attention" for item in value)
    numbers = isinstance(value, int) and isinstance(max_positions, int) and not isinstance(value, bool)
    return numbers and value >= max_positions  # type: ignore[operator]


def windows_off(raw: Mapping[str, object]) -> bool:
    """True when config.json says that its sliding windows are not used."""
    return raw.get("use_sliding_window") is False or ("sliding_window" in raw and raw["sliding_window"] is None)
