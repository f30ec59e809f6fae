"""Names of things."""

from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)  # "prefill-0", "decode-1"
PageId = NewType("PageId", int)


class Role(StrEnum):
    """Which phase an instance runs."""

    PREFILL = "prefill"
    DECODE = "decode"
