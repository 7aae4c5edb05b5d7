"""Families that are data: sizes against published ones, and what runs of them cost."""

from __future__ import annotations

import json

import pytest

from tests.family_configs import PUBLISHED, Config
from workloads.huggingface import parse_config
from workloads.model import ModelSpec
from workloads.params import facts


def read(config: Config) -> ModelSpec:
    return parse_config(json.dumps(config), where="c.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_and_cache_are_the_published_ones(name: str) -> None:
    config, billions, kv = PUBLISHED[name]
    found = facts(read(config))
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["kv_bytes_per_token"] == kv
