"""Builders the engine tests share: a tiny random Llama, LoRA adapters for it, real engine processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import torch

torch.set_num_threads(1)

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps while seven wizards box in the warm autumn light"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def make_model(folder: Path, seed: int = 0, scale: float = 1.0, width: int = 172) -> Path:
    """A two-layer Llama of random weights; `scale` sharpens its distributions, `width` is its inner layer's."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2 * scale,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=2, bos_token_id=1)
    model.save_pretrained(folder)
    return folder


def make_lora(folder: Path, model_dir: Path, seed: int = 5, rank: int = 4) -> Path:
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    wrapped.save_pretrained(str(folder))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Live:
    """A running engine process."""

    def __init__(self, model: Path, log: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "reef_cli.engines.embedded", "--model-path", str(model), "--port", str(self.port)]
        command += ["--threads", "1", "--weight-version", "base", "--parent-pid", str(os.getpid()), *flags]
        self.process = subprocess.Popen(
            command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=os.environ | (env or {}), start_new_session=True
        )

    def wait(self, seconds: float = 200) -> "Live":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                httpx.get(f"{self.url}/ready", timeout=2)
                return self
            except httpx.TransportError:
                time.sleep(0.1)
        self.stop()  # no fixture does it for an engine it never got
        raise AssertionError("engine did not start: " + self.log.read_text()[-2000:])

    def post(self, path: str, body: dict | None = None, **options) -> httpx.Response:
        return httpx.post(self.url + path, json=body or {}, timeout=60, **options)

    def generate(self, ids: list[int], path: str | None = None, **sampling):
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 16} | sampling,
            "return_logprob": True,
        }
        reply = self.post("/generate", body | ({"lora_path": path} if path else {}))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def running(self) -> int:
        return httpx.get(f"{self.url}/server_info", timeout=30).json()["internal_states"][0]["running"]

    def until_running(self) -> None:
        """Wait until a request holds a seat."""
        deadline = time.monotonic() + 20
        while not self.running():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)


def ids_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 400, (length,), generator=generator).tolist()


async def settled(check, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        await asyncio.sleep(0.02)
    return False
