"""Converts a GGUF file into a bfloat16 safetensors folder; run as a script in a process of its own.

A process of its own keeps what transformers prints, its global settings and its memory out of the
caller's. It imports nothing of agentkv. Usage: ``python -P gguf_script.py WEIGHTS.gguf FOLDER``;
each line on standard output that begins with ``agentkv `` is for the caller.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def main(weights: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights of `weights` into `folder`."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    print("agentkv load", flush=True)
    import torch
    import transformers

    place, name = str(weights.parent), weights.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=name,
        local_files_only=True,
        dtype=torch.bfloat16,
        # Without dequantize the weights stay packed and cannot be saved.
        quantization_config=transformers.GgufConfig(gguf_file=name, dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    print("agentkv save", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"agentkv done {transformers.__version__}", flush=True)


def _end_with_caller() -> None:
    """Wait for the end of standard input, which the caller holds open while it lives, and exit."""
    # os.read, since a thread that holds sys.stdin's lock breaks the interpreter's shutdown.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
