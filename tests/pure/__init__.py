"""Tests that need neither Ray, SGLang, Megatron nor a network: references are written out here."""
