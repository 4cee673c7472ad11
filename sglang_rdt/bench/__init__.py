"""``sglang-rdt bench``: every way to bring weights into an engine, side by side, in one run.

The driver (:mod:`~sglang_rdt.bench.run`) starts engines and Megatron ranks, and asks one path
after the other (:mod:`sglang_rdt.bench.paths`) for syncs. What is compared is the live memory of
the engine with values that both sides can compute for themselves (:mod:`~sglang_rdt.bench.pattern`).
"""
