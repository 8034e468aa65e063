"""Groups that are saved and read again through JSON."""

from __future__ import annotations

import json
import math

import numpy as np

from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.saved_groups import (
    scored_from_plain,
    scored_to_plain,
    unfinished_from_plain,
    unfinished_to_plain,
)
from posttrain.records.trajectories import (
    Invalid,
    Reward,
    ScoredGroup,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Unfinished,
    VersionSpan,
)

PROMPT = Prompt(prompt_id="a:1", token_ids=(1, 2), text="q", data_source="t")
LOGPROB = math.log(1 / 3)  # no short decimal


def test_every_field_comes_back() -> None:
    first = Trajectory(
        sample_id="a:1/0",
        token_ids=(5, 6, 7),
        logprobs=(LOGPROB, 0.0, -1e-9),
        text="äé\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        stop_reason=StopReason.LENGTH,
        policy_version=3,
        version_spans=(VersionSpan(0, 3), VersionSpan(2, 5)),
        response_mask=(True, False, True),
        prompt_token_ids=(9,),
        turns=(
            Turn(start=0, end=1, text="x", reward=0.5, stop_reason=StopReason.EOS, policy_version=3, state_key="s"),
        ),
        env_reward=0.25,
        env_metrics=(("moves", 2.0),),
        experts=np.arange(12, dtype=np.int16).reshape(3, 2, 2),
        images=PromptImages(
            files=(b"a\xff", b"b"), features={"pixel_values": np.float32([[0.1, 2]])}, content_hash="h", in_prompt=1
        ),
    )
    second = Trajectory(
        sample_id="a:1/1",
        token_ids=(1,),
        logprobs=(LOGPROB,),
        text="",
        stop_reason=StopReason.FAILED,
        policy_version=4,
        failure="gone",
        earlier=(first,),
    )
    scored = ScoredGroup(
        group=TrajectoryGroup(prompt=PROMPT, trajectories=(first, second)),
        outcomes=(Reward(0.1, (("math", 0.1),), (("math/pred", "7"),), by_turn=False), Invalid("timeout", "after 3 s")),
        kept=False,
    )
    plain = json.loads(json.dumps(scored_to_plain(scored)))
    found = scored_from_plain(plain, {"a:1": PROMPT})
    assert found == scored
    experts = found.group.trajectories[1].earlier[0].experts
    assert experts is not None and experts.dtype == np.int16 and (experts == first.experts).all()
    assert found.group.trajectories[1].experts is None
    images = found.group.trajectories[0].images
    assert images is not None and found.group.trajectories[1].images is None
    assert (images.files, images.content_hash, images.in_prompt) == ((b"a\xff", b"b"), "h", 1)
    assert images.features["pixel_values"].dtype == np.float32
    assert images.features["pixel_values"].tolist() == [[np.float32(0.1), 2.0]]


def test_an_unfinished_response_comes_back() -> None:
    unfinished = Unfinished(sample_id="4/1", token_ids=(5,), logprobs=(LOGPROB,), spans=(VersionSpan(0, 2),))
    assert unfinished_from_plain(json.loads(json.dumps(unfinished_to_plain(unfinished)))) == unfinished
