"""What the conditionings of a sampling run come to."""

from typing import Any


def evaluated(guider: Any) -> int:
    """How many are evaluated at a step, at most; without guidance the negative ones are not."""
    alone = getattr(guider, "cfg", None) == 1
    return sum(len(conds) for name, conds in guider.conds.items() if not (alone and name == "negative"))


def longest_text(guider: Any) -> int:
    """Tokens of the longest text among them; 0 where none has one."""
    texts = [cond.get("cross_attn") for conds in guider.conds.values() for cond in conds]
    return max((text.shape[1] for text in texts if text is not None), default=0)
