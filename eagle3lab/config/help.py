"""What `--help` prints: the groups with their options, and every value of the composed configuration.

Hydra's own help copies its whole configuration cache once per group; with fifty option files that alone
takes longer than a command should take to answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from omegaconf import OmegaConf

from .compose import ROOTS, Check, explain, try_compose
from .options import config_directory, options_of
from .words import overrides_of

TITLES = {
    "train": "Train an EAGLE-3 draft model on a hidden-state store.",
    "extract": "Write the hidden states of a verifier over conversations to a store.",
    "evaluate": "Decode prompts with a draft and its verifier; measure how many drafted tokens are accepted.",
}


def help_text(entry: str, words: Sequence[str], check: Check) -> str:
    """The page for one command, with the overrides among `words` already in the values it shows.

    Raises `UserError` for overrides that do not compose.
    """
    overrides = overrides_of(words)
    cfg, error = try_compose(entry, overrides)
    if cfg is None:
        assert error is not None
        raise explain(error, entry, overrides, check)
    chosen = re.sub("^draft_dir:", "draft:", OmegaConf.to_yaml(cfg).rstrip(), flags=re.MULTILINE)
    groups = [path.name for path in sorted(config_directory().iterdir()) if path.is_dir()]
    beside = () if entry == "evaluate" else ("experiment", "launcher")  # no key of the schema is called so
    own = [g for g in groups if g in vars(ROOTS[entry]()) or g in beside]
    first = " draft=DIR" if entry == "evaluate" else ""
    sweeps = " or -cd sweeps -cn NAME" if entry == "train" else ""
    return "\n".join(
        [
            TITLES[entry],
            "",
            f"    python {entry}.py{first} GROUP=OPTION ... KEY=VALUE ...",
            "",
            "Groups and their options:",
            "",
            *(f"{group}: {', '.join(options_of(group, entry))}" for group in own),
            "",
            "Values (any can be given as KEY=VALUE; the groups above set many at once). eagle3lab/config/schema.py says",
            "what each one means and which words it takes:",
            "",
            chosen,
            "",
            f"Sweeps: -m KEY=A,B{sweeps}. The composed configuration: --cfg job. Hydra's own: --hydra-help.",
        ]
    )
