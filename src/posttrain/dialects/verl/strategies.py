"""verl's strategies: its words for training engines, by which it decides whose keys it reads."""

MEGATRON = "megatron"
SHARDED = ("fsdp", "fsdp2")
SHARDED_TEXT = "the strategies fsdp and fsdp2"
