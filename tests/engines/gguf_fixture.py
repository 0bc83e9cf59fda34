"""A tiny Llama as a GGUF file, made with the reference writer."""

from pathlib import Path

import gguf
import numpy as np
import torch


def write_tiny_gguf(path: Path) -> torch.Tensor:
    """Write the file and return its embedding `[vocab, hidden]` in fp32."""
    rng = np.random.default_rng(0)
    hidden, inner, heads, kv_heads = 64, 96, 4, 2
    alphabet = _byte_alphabet()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġt"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    embedding = rng.normal(size=(len(tokens), hidden)).astype(np.float32)
    kv = hidden // heads * kv_heads
    shapes = {
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (kv, hidden),
        "blk.0.attn_v.weight": (kv, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
    }
    writer.add_tensor("token_embd.weight", embedding)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(embedding)


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
