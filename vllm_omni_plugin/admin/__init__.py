"""What a fleet shows of itself and lets its operator do, over HTTP: routes, who may use them, metrics, explanations.

May import `orchestrator` and the layers below, no vLLM. Start with `routes`, or with `hold` for requests that wait.
"""
