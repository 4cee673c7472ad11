"""The zoo's names and shapes are those that transformers' own models take from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from tests.families.zoo import FAMILIES

pytestmark = pytest.mark.families


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_takes_every_tensor(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[name]
    config = family.make_config()
    model, info = getattr(transformers, family.architecture).from_pretrained(
        None,
        config=config,
        state_dict=family.hf_state(0, torch.float32),
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not {what: names for what, names in info.items() if names}
    with torch.no_grad():
        assert model(torch.tensor([[1, 5, 7, 9]])).logits.isfinite().all()


def test_everything_is_random_and_repeats() -> None:
    for family in FAMILIES.values():
        one, again = family.hf_state(3), family.hf_state(3)
        assert all(torch.equal(one[n], again[n]) for n in one)
        other = family.hf_state(4)
        assert not any(torch.equal(one[n], other[n]) for n in one)
        if family.has_mtp:
            assert family.hf_state(3, mtp=True).keys() > one.keys()
