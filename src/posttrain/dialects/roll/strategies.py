"""ROLL's strategies: its words for training engines, without the ending _train, by which it decides whose keys it reads."""

MEGATRON = "megatron"
DEEPSPEED = "deepspeed"
SHARDED = "fsdp2"
ONE_PROCESS = "local"
