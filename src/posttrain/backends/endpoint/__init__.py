"""An OpenAI-compatible endpoint over a sampler, for existing agents.

agent ──HTTP──▶ app.py ──▶ request.py (parse) ──▶ sessions.py (token ids) ──▶ driver.py ──▶ sampler
                   └──▶ record.py: every response, token by token
"""
