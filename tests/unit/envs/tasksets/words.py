"""Tasks in the form of verifiers 0.4, as its documentation builds them: one answer, a scripted user, tools of their own."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["WordsEnv", "WordsTaskset"]


class WordData(vf.TaskData):
    answer: str
    user_turns: list[str] = []


class Shout(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "voice"

    @vf.tool
    def shout(self, word: str) -> str:
        """Say a word loudly."""
        return word.upper() + "!"


class WordTaskConfig(vf.TaskConfig):
    loud: bool = False
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class WordTask(vf.Task[WordData, vf.State, WordTaskConfig]):
    @classmethod
    def toolsets(cls, config: WordTaskConfig) -> list[vf.Toolset]:
        return [Shout(config.tools)] if config.loud else []

    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))

    @vf.metric
    async def spoken(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordsConfig(vf.TasksetConfig):
    scripted: bool = False
    task: WordTaskConfig = WordTaskConfig()


class WordsTaskset(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> list[WordTask]:
        made = []
        for place, word in enumerate(("red", "blue")):
            asked = f"Say {word}."
            spoken = {"user_turns": [asked, "Again.", "Once more."]} if self.config.scripted else {"prompt": asked}
            data = WordData(idx=place, system_prompt="You obey.", answer=word, **{"prompt": None, **spoken})
            made.append(WordTask(data, self.config.task))
        return made


class WordsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        if not task.data.user_turns:
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as talk:
            for asked in task.data.user_turns:
                if (await talk.turn(asked)).terminated:
                    return


if __name__ == "__main__":  # as which the package starts its tools
    Shout.run()
