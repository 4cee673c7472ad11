"""What runs inside SGLang: names, load recorder, SchedulerActor methods, event-loop calls.

Every module here imports without SGLang; what needs it imports it when it runs.
"""
