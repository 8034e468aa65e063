"""The environments of a plan."""

from __future__ import annotations

from posttrain.config import RunConfig
from posttrain.config.environment import OPEN


def worlds_text(config: RunConfig) -> str:
    """Describe the environments, the form of a training sample, and the concurrency; "" without environments."""
    environment = config.environment
    if not environment.used:
        return ""
    lines = []
    is_open = environment.name == OPEN
    if environment.name is not None and (is_open or not environment.named or environment.train_episodes is None):
        lines.append(f"{environment.name}{_settings(environment.settings)}{_turns(environment.max_turns)}")
    total = sum(each.weight for each in environment.named.values())
    for tag, each in environment.named.items():
        share = f"{each.weight / total:.0%} of episodes: " if environment.train_episodes is not None and total else ""
        turns = _turns(each.max_turns or environment.max_turns)
        scores = "scores " if is_open else ""
        lines.append(f"{scores}{tag}: {share}{each.name}{_settings(each.settings)}{turns}")
    sample = "a turn" if environment.sample_per_turn else "an episode"
    where = f"{environment.workers} at once" if environment.workers else "in this process"
    if is_open:
        lines += _open_lines(environment.settings)
        where = "as many at once as a step has"
    lines.append(f"{where}; a training sample is {sample}")
    return f"\n{'':<11}".join(lines)


def _open_lines(settings: dict[str, object]) -> list[str]:
    """Describe the address of the endpoint, and the variables that a client sets."""
    address = f"http://{settings.get('host', '127.0.0.1')}:{settings.get('port', 8001) or 'PORT'}"
    token = settings.get("token_file") or "endpoint_token in the run folder"
    return [
        f"open to programs: OPENAI_BASE_URL={address}/v1, OPENAI_API_KEY is in {token};",
        f"rewards go to POST {address}/rewards",
    ]


def _settings(settings: dict[str, object]) -> str:
    shown = [f"{name}={_short(value)}" for name, value in settings.items()]
    return f" ({', '.join(shown)})" if shown else ""


def _turns(turns: int | None) -> str:
    return "" if turns is None else f", up to {turns} turns"


def _short(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = [each["name"] for each in value]  # of tools, or of interactions
    text = " ".join(str(value).split())
    return text if len(text) <= 30 else f"{text[:29]}…"


def episodes_text(count: int | None) -> str:
    """Format the count of generated episodes, shown in place of files."""
    return "" if count is None else f"{count} generated episodes"
