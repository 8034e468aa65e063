"""An OpenAI-compatible address over a sampler, for agents that exist already.

agent ──HTTP──▶ app.py ──▶ asked.py (what is asked for) ──▶ sessions.py (in which tokens) ──▶ driver.py ──▶ sampler
                   └──▶ record.py: every response, token by token
"""
