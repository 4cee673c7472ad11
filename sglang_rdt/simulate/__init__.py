"""A sync on paper: a model's shape and two layouts in, the real planner's plan and a time out.

Nothing here needs torch, Ray, SGLang or Megatron-core.
"""
