"""An adapter's pickle made without torch is read by torch, and by our own careful reader, as the very same tensors."""

import pickle
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.weights.handles import deserialize
from reef_cli.weights.pickled import payload

TENSORS = {
    "base_model.model.a.lora_A.weight": torch.randn(4, 300, dtype=torch.float32).bfloat16(),
    "base_model.model.a.lora_B.weight": torch.randn(7, 4),
    "half": torch.randn(3, dtype=torch.float32).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, str(tmp_path / "adapter_model.safetensors"), metadata={"format": "pt"})
    return tmp_path


def test_torch_and_our_reader_find_the_same_tensors(folder: Path) -> None:
    text = payload(folder)
    for found in (pickle.loads(b64decode(text)), dict(deserialize(text))):
        assert sorted(found) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype and found[name].is_contiguous() and torch.equal(found[name], tensor)
            found[name].add_(1)  # its memory is its own
    again = b64encode(pickle.dumps(load_file(str(folder / "adapter_model.safetensors")))).decode()
    assert {name: tensor.tolist() for name, tensor in deserialize(again)} == {
        name: tensor.tolist() for name, tensor in deserialize(text)
    }


def test_it_needs_no_torch(folder: Path) -> None:
    code = "import sys; from pathlib import Path; from reef_cli.weights.pickled import payload; payload(Path(sys.argv[1]))"
    code += "; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.parametrize("fault", ["missing", "cut", "type", "header"])
def test_what_cannot_be_read_is_refused(folder: Path, fault: str) -> None:
    file = folder / "adapter_model.safetensors"
    if fault == "missing":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    elif fault == "type":
        save_file({"a": torch.zeros(2, dtype=torch.int64)}, str(file))
    else:
        file.write_bytes(b"\xff" * 40)
    with pytest.raises(UnsupportedArtifact):
        payload(folder)
