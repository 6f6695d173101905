"""Evaluations and run directories as the commands write them, with counts that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """\
model:
  name: tiny
noise:
  kind: {noise}
optim:
  lr: {lr}
train:
  seed: {seed}
data:
  seed: 0
store: /stores/{store}
run_name: {name}
run_dir: /outputs/{name}
"""

Steps = Mapping[str, Sequence[int]]  # prompt id -> accepted tokens of every verification step


def drawn_steps(num_prompts: int, rate: float, *, seed: int, k: int = 3) -> dict[str, list[int]]:
    """Steps whose drafted tokens are right with a chance around `rate`, prompts of uneven difficulty."""
    difficulty = np.random.default_rng(1).uniform(-0.2, 0.2, num_prompts)
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(num_prompts):
        right = rng.random((int(rng.integers(10, 40)), k)) < rate + difficulty[i]
        found[f"p{i}"] = [int(x) for x in right.cumprod(1).sum(1)]
    return found


def write_evaluation(directory: Path, steps: Mapping[int, Steps] | Steps, **changed: Any) -> Path:
    """`evaluation.json` of format version 1: the steps of every k (alone: k=3); even and odd prompts are a category each.

    `changed`: keys of the setup, and by prompt id `num_prompt_tokens`, `own_text`, `prompt_sha256`.
    """
    by_k: Mapping[int, Any] = steps if all(isinstance(k, int) for k in steps) else {3: steps}
    num_tokens, own_text = changed.pop("num_prompt_tokens", {}), changed.pop("own_text", {})
    hashes = changed.pop("prompt_sha256", {})
    ids = list(dict.fromkeys(i for of_k in by_k.values() for i in of_k))
    setup = {
        "verifier": {"name": "tiny", "config_hash": "c" * 64, "architecture": "LlamaForCausalLM"},
        "draft": str(directory.parent / "draft"),
        "prompts": {"name": "demo"},
        "template_args": {},
        "max_new_tokens": 64,
        "temperature": 0.0,
        "precision": "fp32",
        "device": "cpu",
        "seed": 0,
        "backend": "hf",
    } | changed
    prompts = [
        {
            "id": i,
            "category": ("even", "odd")[int(i[1:]) % 2],
            "num_prompt_tokens": num_tokens.get(i, 10),
            "prompt_sha256": hashes.get(i),
            "plain": {"tokens": own_text.get(i, [1, 2, 3]), "seconds": 1.0, "text": ""},
            "trials": [
                {
                    "variant": variant,
                    "k": k,
                    "accepted_per_step": list(of_k[i]) if variant == "trained" else [0],
                }
                for variant in ("untrained", "trained")
                for k, of_k in by_k.items()
            ],
        }
        for i in ids
    ]
    variants = [
        {"variant": "trained", "k": k, "overall": {"drafts": sum(map(len, of_k.values()))}}
        for k, of_k in by_k.items()
    ]
    directory.mkdir(parents=True, exist_ok=True)
    content = {"format": "eagle3lab-evaluation", "format_version": 1, "setup": setup} | {
        "variants": variants,
        "prompts": prompts,
    }
    (directory / "evaluation.json").write_text(json.dumps(content))
    return directory


def write_run(run_dir: Path, steps: Mapping[int, Steps] | Steps | None = None, **config: Any) -> Path:
    """A run directory: configuration, provenance, and its evaluation where `steps` are given."""
    run_dir.mkdir(parents=True)
    values = {"noise": "none", "lr": "0.001", "seed": 0, "store": "a", "name": run_dir.name} | config
    (run_dir / "config.yaml").write_text(CONFIG.format(**values))
    provenance = {
        "git": {"commit": config.get("commit", "1" * 40), "dirty": False},
        "store": {"manifest_hash": config.get("manifest", "m" * 64)},
    }
    (run_dir / "provenance.json").write_text(json.dumps(provenance))
    (run_dir / "draft").mkdir()
    (run_dir / "draft" / "model.safetensors").touch()
    if steps is not None:
        write_evaluation(run_dir / "evaluation-demo", steps)
    return run_dir
