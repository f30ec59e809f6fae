"""Who takes part."""

from dataclasses import dataclass

from narrows.core.ids import InstanceId, Role


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What an instance announces when it is ready.

    `address` is where its transport listens, in the transport's own words; `incarnation` changes at every start.
    """

    id: InstanceId
    role: Role
    incarnation: str
    address: str
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
