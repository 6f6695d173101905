"""The options of conf/model against the published configurations."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from eagle3lab.config import compose
from eagle3lab.config.schema import Shapes

from .checkpoints import KINDS
from .options import STANDS
from .published import PUBLISHED, count_parameters, published_config

DIRECTORY = compose.config_directory() / "model"
REAL = {"smollm2_135m", "tiny", "local"}  # run as they are, or whatever a user has


def test_every_option_has_a_tiny_checkpoint_and_a_published_configuration() -> None:
    options = {path.stem for path in DIRECTORY.glob("*.yaml")} - REAL
    assert options == STANDS.keys() == PUBLISHED.keys()
    assert {stand.kind for stand in STANDS.values()} | {s.served for s in STANDS.values()} <= KINDS.keys()


@pytest.mark.parametrize("option", PUBLISHED)
def test_shapes_and_the_number_of_weights_are_those_of_the_published_configuration(option: str) -> None:
    shapes = Shapes(**yaml.safe_load((DIRECTORY / f"{option}.yaml").read_text())["shapes"])
    config = published_config(option)
    latent = getattr(config, "kv_lora_rank", None)
    assert dataclasses.asdict(shapes) | {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.v_head_dim if latent else config.head_dim,
        "vocab_size": config.vocab_size,
        "num_parameters": count_parameters(option)[0],
        "kv_lora_rank": latent,
        "qk_rope_head_dim": config.qk_rope_head_dim if latent else None,
    } == dataclasses.asdict(shapes)


@pytest.mark.parametrize("option", PUBLISHED)
def test_the_active_weights_stated_are_those_that_a_token_meets(option: str) -> None:
    """Model cards round, and some leave the embedding out."""
    stated = yaml.safe_load((DIRECTORY / f"{option}.yaml").read_text())["shapes"].get("num_active_parameters")
    total, active = count_parameters(option)
    config = published_config(option)
    looked_up = config.vocab_size * config.hidden_size
    assert (stated is None) == (active == total)
    if stated is not None:
        assert 0.98 * (active - looked_up) <= stated <= 1.02 * active
