"""Write goldens.json and goldens.npz: what transformers' torch models compute for the cases of tiny.py.

    PYTHONPATH=. python tests/llm/make_goldens.py

Needs torch and transformers 5 (its configs are then stored in the spelling of transformers 5).
"""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open

from tests.llm import tiny


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits of a model folder, float32 on the CPU."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.numpy()


def main() -> None:
    import torch
    import transformers

    goldens, logits = {}, {}
    for case, said in tiny.CASES.items():
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(said)))
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
                shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
            found = json.loads((Path(folder) / "config.json").read_text())
            tiny.write(Path(folder), found, tiny.weights(shapes))
            logits[case] = torch_logits(Path(folder), tiny.tokens(case))
        goldens[case] = {"config": {key: value for key, value in sorted(found.items())}, "tensors": shapes}
        print(f"{case}: logits of size {np.abs(logits[case]).mean():.3f}")
    note = {"transformers": transformers.__version__, "torch": torch.__version__}
    for golden in goldens.values():
        golden["made by"] = note
    (tiny.HERE / "goldens.json").write_text(json.dumps(goldens, indent=1) + "\n")
    np.savez_compressed(tiny.HERE / "goldens.npz", **logits)


if __name__ == "__main__":
    main()
