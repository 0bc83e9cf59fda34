"""`python -m reef_cli.engines.convert_gguf FILE FOLDER`: a quantised GGUF model as a bfloat16 Hugging Face folder.

Runs as a process of its own, so that torch stays out of whoever asks. The folder holds what a trainer and an engine expect of
an ordinary checkpoint: no quantisation note, no copy of a tied head, tokenizer, chat template and end tokens.
"""

import sys
from pathlib import Path
from typing import Any


def main(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    target.mkdir(parents=True)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
