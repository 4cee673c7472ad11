"""The planner: dataclasses in, dataclasses out.

Pure: no torch, no Ray, no SGLang, no Megatron. Wants (what an engine rank's loader copies from
which HF tensor) and exports (which trainer rank yields which HF tensor) become routes (who stages
which bytes for whom, in which round).
"""
