"""SkyRL's strategies: its words for training engines, by which it decides whose keys it reads."""

MEGATRON = "megatron"
DEEPSPEED = "deepspeed"
SHARDED = ("fsdp", "fsdp2")
CANNOT_OFFLOAD = "fsdp"  # FSDP1 does not train with weights in CPU memory
